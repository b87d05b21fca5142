# SPDX-License-Identifier: Apache-2.0
"""Checks that several parts make of what a caller gives."""

from __future__ import annotations

import os

from .errors import ArgumentError, shown

__all__ = ["check_flag", "check_integer", "check_type", "is_integer", "path_of", "paths_of"]


def is_integer(value: object, least: int, most: int) -> bool:
    """Whether it is an int, and no bool, within a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_integer(value: object, name: str, least: int = 0, most: int = 2**31 - 1) -> None:
    """Refuse what is no integer of a range."""
    if not is_integer(value, least, most):
        raise ArgumentError(f"{name} is {shown(value)}; it takes an integer from {least} to {most}")


def check_flag(value: object, name: str) -> None:
    """Refuse what is no bool."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {shown(value)}; it takes True or False")


def check_type(value: object, type_: type, name: str) -> None:
    """Refuse what is no instance of a type."""
    if not isinstance(value, type_):
        raise ArgumentError(f"{name} is {shown(value)}; it takes a {type_.__name__}")


def path_of(path: object, name: str) -> str:
    """Return the path that a caller names a file by."""
    try:
        found = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:  # it is no path
        found = "\0"
    if not found or "\0" in found:
        raise ArgumentError(f"{name} is {shown(path)}; it takes the path of a file")
    return found


def paths_of(paths: object, name: str) -> tuple[str, ...]:
    """Return the paths that a caller names folders by."""
    if not isinstance(paths, (tuple, list)):
        raise ArgumentError(f"{name} is {shown(paths)}; it takes a tuple or list of paths")
    return tuple(path_of(path, name) for path in paths)
