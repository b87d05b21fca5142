# SPDX-License-Identifier: Apache-2.0
"""The environment variables, read once into one frozen value.

Importing the package refuses none of them: `Settings.check` does, where a setting is first needed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import SettingsError, nearest

__all__ = ["Settings", "parse_bytes", "read", "settings", "unknown_lines"]

_ON_COMPILE = ("allow", "warn", "error")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_PREFIX = "TRANSFORMER_RTC_"
_NAMES = frozenset(
    _PREFIX + name
    for name in (
        "CACHE_DIR", "CACHE_SIZE", "COMPANION", "FORCE_STATIC", "LOG", "ON_COMPILE", "OTHER_NVRTC",
        "READ_ONLY_CACHE_DIR", "RECORD", "SIMULATE", "TUNING",
    )
)  # fmt: skip

_warned = False


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes
    ----------
    force_static : bool
        ``TRANSFORMER_RTC_FORCE_STATIC=1``: never compile; use the kernels in the package.
    cache_dir : str or None
        ``TRANSFORMER_RTC_CACHE_DIR``: the disk cache's folder; None where the variable is empty: no disk cache.
    simulate : str
        ``TRANSFORMER_RTC_SIMULATE``: ``"1"`` or ``"checked"``: operators run on the CPU, in the simulator; else empty.
    on_compile : str
        ``TRANSFORMER_RTC_ON_COMPILE``: what a compile does: ``"allow"``, ``"warn"`` or ``"error"``.
    log : int
        ``TRANSFORMER_RTC_LOG``: 1 prints a line for each compile and load, 2 also the program and the
        compiler's report.
    read_only_cache_dir : str or None
        ``TRANSFORMER_RTC_READ_ONLY_CACHE_DIR``: a second folder, such as one in a container's image, that is only read.
    cache_bytes : int
        ``TRANSFORMER_RTC_CACHE_SIZE``: of the disk cache, about, such as ``500M``; 1G by default; 0: without limit.
    record : str or None
        ``TRANSFORMER_RTC_RECORD``: the manifest to which is added what operators are asked for.
    tuning : str
        ``TRANSFORMER_RTC_TUNING``: a tuning file; ``"off"``: none is read; empty: the device's, beside the disk cache.
    other_nvrtc : bool
        ``TRANSFORMER_RTC_OTHER_NVRTC``: ``off``: what another NVRTC made of the same source, in the read-only folder or
        in the companion wheel, is not used.
    companion : bool
        ``TRANSFORMER_RTC_COMPANION``: ``off``: the companion wheel's kernels are not used, although it is installed.
    problems : tuple of str
        What is wrong with variables, which have their defaults instead.
    unknown : tuple of str
        Variables that begin as these do, and are none of them.
    """

    force_static: bool
    cache_dir: str | None
    simulate: str
    on_compile: str
    log: int
    read_only_cache_dir: str | None
    cache_bytes: int
    record: str | None
    tuning: str = ""
    companion: bool = True
    other_nvrtc: bool = True
    problems: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse variables that are wrong, and warn once in a process of those that are unknown.

        Raises
        ------
        SettingsError
            If a variable has a value that it does not take.
        """
        global _warned
        if self.problems:
            raise SettingsError("; ".join(self.problems))
        if self.unknown and not _warned:
            _warned = True
            for line in unknown_lines(self):
                warnings.warn(f"transformer_rtc: {line}", RuntimeWarning, stacklevel=3)


def unknown_lines(of: Settings) -> list[str]:
    """Return what is said of each variable that begins as ours do and is none of them."""
    return [f"{name} is no variable of transformer_rtc{nearest(name, _NAMES, _PREFIX)}" for name in of.unknown]


def parse_bytes(text: str) -> int | None:
    """Return a number of bytes that may end in K, M, G or T; None where it is none."""
    unit = text[-1:].upper() if text[-1:].upper() in _UNITS else ""
    number = text.removesuffix(text[-1:]) if unit else text
    return int(number) * _UNITS[unit] if number.isascii() and number.isdigit() else None


def _default_cache_dir(environment: Mapping[str, str]) -> str:
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as its specification asks
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        return os.path.join(base, "transformer_rtc")
    # A user without a home, as containers have them. A folder that somebody else has put there is refused.
    return os.path.join(os.path.abspath(environment.get("TMPDIR") or "/tmp"), f"transformer_rtc-{os.geteuid()}")


def read(environment: Mapping[str, str]) -> Settings:
    """Read the settings from an environment. What a variable does not take is among the problems."""
    problems: list[str] = []

    def choice(name: str, accepted: tuple[str, ...]) -> str:
        value = environment.get(name, "") or accepted[0]
        if value in accepted:
            return value
        problems.append(f"{name} is {value!r}; it takes {', '.join(accepted)}")
        return accepted[0]

    def path(name: str) -> str | None:
        # Absolute: what was meant does not change with the current folder.
        try:
            return os.path.abspath(os.path.expanduser(environment[name])) if environment.get(name) else None
        except FileNotFoundError:
            problems.append(f"{name} is {environment[name]!r}, and there is no current folder any more")
            return None

    cache_dir = path("TRANSFORMER_RTC_CACHE_DIR")
    if "TRANSFORMER_RTC_CACHE_DIR" not in environment:
        cache_dir = _default_cache_dir(environment)
    size = environment.get("TRANSFORMER_RTC_CACHE_SIZE") or "1G"
    cache_bytes = parse_bytes(size)
    if cache_bytes is None:
        problems.append(f"TRANSFORMER_RTC_CACHE_SIZE is {size!r}; it takes bytes, such as 1G, 500M, 0 for no limit")
        cache_bytes = 2**30
    force_static = choice("TRANSFORMER_RTC_FORCE_STATIC", ("0", "1")) == "1"
    simulate = choice("TRANSFORMER_RTC_SIMULATE", ("0", "1", "checked"))
    if force_static and simulate != "0":
        problems.append(f"TRANSFORMER_RTC_SIMULATE={simulate} contradicts TRANSFORMER_RTC_FORCE_STATIC=1")
    return Settings(
        force_static=force_static,
        simulate="" if simulate == "0" else simulate,
        cache_dir=cache_dir,
        on_compile=choice("TRANSFORMER_RTC_ON_COMPILE", _ON_COMPILE),
        log=int(choice("TRANSFORMER_RTC_LOG", ("0", "1", "2"))),
        read_only_cache_dir=path("TRANSFORMER_RTC_READ_ONLY_CACHE_DIR"),
        cache_bytes=cache_bytes,
        record=path("TRANSFORMER_RTC_RECORD"),
        tuning="off" if environment.get("TRANSFORMER_RTC_TUNING") == "off" else path("TRANSFORMER_RTC_TUNING") or "",
        companion=choice("TRANSFORMER_RTC_COMPANION", ("on", "off")) == "on",
        other_nvrtc=choice("TRANSFORMER_RTC_OTHER_NVRTC", ("on", "off")) == "on",
        problems=tuple(problems),
        unknown=tuple(sorted(name for name in environment if name.startswith(_PREFIX) and name not in _NAMES)),
    )


settings = read(os.environ)
