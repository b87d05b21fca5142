# SPDX-License-Identifier: Apache-2.0
"""The environment variables, read once into one frozen value.

Importing the package refuses none of them: `Settings.check` does, where a setting is first needed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .errors import SettingsError, nearest

__all__ = [
    "OTHERS",
    "PREFIX",
    "VARIABLES",
    "Settings",
    "Variable",
    "parse_bytes",
    "read",
    "settings",
    "unknown_lines",
]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
PREFIX = "TRANSFORMER_RTC_"


class Variable(NamedTuple):
    """An environment variable, for the help of the command line and for the documentation.

    Attributes
    ----------
    name : str
        As the environment has it.
    takes : str
        What values it may have, where `words` do not say it.
    default : str
        What holds without it.
    text : str
        What it does, as a sentence.
    words : tuple of str
        The values that it takes, the default first. Empty: others than words.
    """

    name: str
    takes: str
    default: str
    text: str
    words: tuple[str, ...] = ()


def _of_words(name: str, words: tuple[str, ...], text: str) -> Variable:
    return Variable(PREFIX + name, ", ".join(words), words[0], text, words)


# What `read` reads; everything that lists variables lists these.
VARIABLES = (
    Variable(
        f"{PREFIX}CACHE_DIR", "a folder; empty: no disk cache", "transformer_rtc in the user's cache folder",
        "The folder of the disk cache.",
    ),
    Variable(
        f"{PREFIX}READ_ONLY_CACHE_DIR", "a folder", "none",
        "A second folder of compiled kernels, which is only read, such as one in a container's image.",
    ),
    Variable(
        f"{PREFIX}CACHE_SIZE", "bytes, such as 500M; 0: no limit", "1G",
        "About how large the disk cache may be. Entries that were not used for longest are deleted first.",
    ),
    _of_words("COMPANION", ("on", "off"), "off: kernels of the companion wheel are not used."),
    _of_words(
        "OTHER_NVRTC", ("on", "off"),
        "off: what another NVRTC compiled is not used, in the read-only folder and in the companion wheel.",
    ),
    _of_words("ON_COMPILE", ("allow", "warn", "error"), "What a compile does: nothing more, a warning, or an error."),
    _of_words("FORCE_STATIC", ("0", "1"), "1: nothing is compiled; the general kernels in the package run instead."),
    _of_words(
        "SIMULATE", ("0", "1", "checked"),
        "1: operators run on the CPU, in the simulator. checked: every memory access is checked, too.",
    ),
    Variable(f"{PREFIX}RECORD", "a file", "none", "The manifest to which this process adds what operators ask for."),
    Variable(
        f"{PREFIX}TUNING", "a file, or off", "the GPU's file in the cache folder, and in the read-only one",
        "The tuning file. off: none is read.",
    ),
    _of_words(
        "LOG", ("0", "1", "2"),
        "1: a line on stderr for each compile and load. 2: the program and the compiler's report, too.",
    ),
)  # fmt: skip

# Other programs' variables that the package reads.
OTHERS = (
    Variable("CXX", "a command", "g++, else clang++, else c++", "The C++ compiler of the simulator."),
    Variable("XDG_CACHE_HOME", "an absolute path", "~/.cache", "The user's cache folder."),
    Variable("TMPDIR", "a folder", "/tmp", "Where the disk cache is of a user without a home."),
    Variable(
        "LD_LIBRARY_PATH, CONDA_PREFIX, CUDA_HOME, CUDA_PATH", "folders", "/usr/local/cuda",
        "Where NVRTC is looked for, in this order, if its wheel is not installed.",
    ),
)  # fmt: skip

_NAMES = frozenset(variable.name for variable in VARIABLES)
_WORDS = {variable.name: variable.words for variable in VARIABLES}

_warned = False


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. `VARIABLES` says what each variable is.

    Attributes
    ----------
    force_static : bool
        ``TRANSFORMER_RTC_FORCE_STATIC``.
    cache_dir : str or None
        ``TRANSFORMER_RTC_CACHE_DIR``, as an absolute path; None where it is empty.
    simulate : str
        ``TRANSFORMER_RTC_SIMULATE``: ``"1"`` or ``"checked"``; else empty.
    on_compile : str
        ``TRANSFORMER_RTC_ON_COMPILE``.
    log : int
        ``TRANSFORMER_RTC_LOG``.
    read_only_cache_dir : str or None
        ``TRANSFORMER_RTC_READ_ONLY_CACHE_DIR``, as an absolute path.
    cache_bytes : int
        ``TRANSFORMER_RTC_CACHE_SIZE``; 0: without limit.
    record : str or None
        ``TRANSFORMER_RTC_RECORD``, as an absolute path.
    tuning : str
        ``TRANSFORMER_RTC_TUNING``: an absolute path, or ``"off"``; empty: the device's file, beside the disk cache.
    other_nvrtc : bool
        ``TRANSFORMER_RTC_OTHER_NVRTC``.
    companion : bool
        ``TRANSFORMER_RTC_COMPANION``.
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
    return [f"{name} is no variable of transformer_rtc{nearest(name, _NAMES, PREFIX)}" for name in of.unknown]


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

    def choice(name: str) -> str:
        accepted = _WORDS[name]
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
    force_static = choice("TRANSFORMER_RTC_FORCE_STATIC") == "1"
    simulate = choice("TRANSFORMER_RTC_SIMULATE")
    if force_static and simulate != "0":
        problems.append(f"TRANSFORMER_RTC_SIMULATE={simulate} contradicts TRANSFORMER_RTC_FORCE_STATIC=1")
    return Settings(
        force_static=force_static,
        simulate="" if simulate == "0" else simulate,
        cache_dir=cache_dir,
        on_compile=choice("TRANSFORMER_RTC_ON_COMPILE"),
        log=int(choice("TRANSFORMER_RTC_LOG")),
        read_only_cache_dir=path("TRANSFORMER_RTC_READ_ONLY_CACHE_DIR"),
        cache_bytes=cache_bytes,
        record=path("TRANSFORMER_RTC_RECORD"),
        tuning="off" if environment.get("TRANSFORMER_RTC_TUNING") == "off" else path("TRANSFORMER_RTC_TUNING") or "",
        companion=choice("TRANSFORMER_RTC_COMPANION") == "on",
        other_nvrtc=choice("TRANSFORMER_RTC_OTHER_NVRTC") == "on",
        problems=tuple(problems),
        unknown=tuple(sorted(name for name in environment if name.startswith(PREFIX) and name not in _NAMES)),
    )


settings = read(os.environ)
