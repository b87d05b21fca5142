"""The environment variables, read once into one frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import SettingsError

_ON_COMPILE = ("allow", "warn", "error")


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
    """

    force_static: bool
    cache_dir: str | None
    simulate: str
    on_compile: str
    log: int


def read(environment: Mapping[str, str]) -> Settings:
    """Read the settings from an environment.

    Raises
    ------
    SettingsError
        If a variable has a value that it does not take.
    """

    def choice(name: str, accepted: tuple[str, ...]) -> str:
        value = environment.get(name, "") or accepted[0]
        if value not in accepted:
            raise SettingsError(f"{name} is {value!r}; it takes {', '.join(accepted)}")
        return value

    cache_dir = environment.get("TRANSFORMER_RTC_CACHE_DIR")
    if cache_dir is None:
        base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache_dir = os.path.join(base, "transformer_rtc")
    force_static = choice("TRANSFORMER_RTC_FORCE_STATIC", ("0", "1")) == "1"
    simulate = choice("TRANSFORMER_RTC_SIMULATE", ("0", "1", "checked"))
    if force_static and simulate != "0":
        raise SettingsError(f"TRANSFORMER_RTC_SIMULATE={simulate} contradicts TRANSFORMER_RTC_FORCE_STATIC=1")
    return Settings(
        force_static=force_static,
        simulate="" if simulate == "0" else simulate,
        cache_dir=cache_dir or None,
        on_compile=choice("TRANSFORMER_RTC_ON_COMPILE", _ON_COMPILE),
        log=int(choice("TRANSFORMER_RTC_LOG", ("0", "1", "2"))),
    )


settings = read(os.environ)
