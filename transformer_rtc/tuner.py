# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest configurations on a GPU, and writes them to its tuning file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from . import tuning
from .cache_folder import make_folders
from .cache_locks import close, open_held
from .declaration import declaration_of
from .device import Gpu
from .errors import ArgumentError, CompileError, DriverError, LaunchError, SettingsError
from .kernel_manager import manager
from .manifest import request_fields
from .request import Request
from .select import using
from .spec import DeviceLimits, Target
from .tuning import Tuning, TuningRow, values_of

__all__ = ["MOST_OF_FEW", "Bench", "TuneRecord", "document", "fastest", "sentence", "tune"]


class _Round(NamedTuple):
    """One of the rounds, each of which times what the round before has kept.

    Attributes
    ----------
    calls, placements : int
        Calls of each configuration with arrays at one place, and places.
    keeps : int
        How many of the fastest configurations are kept.
    within : float
        How many times as long as the fastest one they may take.
    """

    calls: int
    placements: int
    keeps: int
    within: float


_ROUNDS = (_Round(3, 1, 24, 1.10), _Round(7, 1, 6, 1.03))
_LAST_CALLS, _LAST_PLACEMENTS = 11, 4
# Of up to 600 that fit, those that the rule finds cheapest: the fastest of these is hardly slower than the fastest of
# all (docs/performance.md).
_MOST_CONFIGURATIONS = 64
# A row is written where it gains so much, and more than twice the spread of the gain.
_LEAST_GAIN = 0.02
# A call with few rows may take so many times what it takes by the default configuration.
_FEW_ROWS, _FEW_REPETITIONS, MOST_OF_FEW = 16, 25, 1.10


class Bench(Protocol):
    """What times the configurations of a request: the default one is the first of `configs`."""

    configs: Sequence[Any]

    def times(self, configs: Sequence[Any], repetitions: int, rows: int | None = None) -> dict[Any, list[float]]: ...
    def takes_unaligned(self, config: Any) -> bool: ...
    def close(self) -> None: ...


# Gets each record, None before the first and behind the last, how many there are by now, and how many there will be.
Progress = Callable[["TuneRecord | None", int, int], None]


class TuneRecord(NamedTuple):
    """What was found for one request.

    Attributes
    ----------
    request : Request
        What an operator is asked for.
    row : TuningRow or None
        What its tuning file has of it now; None: it could not be measured.
    fastest, default : str
        The names of its fastest configuration and of the default one.
    configurations : int
        How many were timed; 0: it was in the file.
    seconds : float
        What that took.
    problem : str
        Why it could not be measured; else empty.
    """

    request: Request
    row: TuningRow | None
    fastest: str
    default: str
    configurations: int = 0
    seconds: float = 0.0
    problem: str = ""


def sentence(record: TuneRecord) -> str:
    """Return what was found, for people."""
    types = "/".join(dict.fromkeys(dtype.name for dtype in record.request.dtypes.values() if dtype))
    what = f"{record.request.operator} of {record.request.columns} columns, {types}"
    if record.row is None:
        return f"{what}: not measured: {record.problem}"
    if record.row.config is None:
        return f"{what}: the default configuration {record.default} stays"
    times = f"{1 + record.row.gain:.3f} (+- {record.row.spread:.3f}) times as fast"
    return f"{what}: {times} by {record.fastest} as by {record.default}"


def document(record: TuneRecord) -> dict[str, Any]:
    """Return what was found, of JSON's types."""
    row = record.row and {name: getattr(record.row, name) for name in ("config", "gain", "spread")}
    return {**record._asdict(), "request": request_fields(record.request), "row": row}


def fastest(bench: Bench) -> tuple[Any, float, float]:
    """Return the fastest configuration, its gain over the default one, and that one's spread.

    Rounds of fewer and fewer configurations have more and more calls, at other placements of the arrays. The default
    one is returned unless another gains 2 % and twice its spread, can be launched for unaligned rows, too, and takes at
    most 10 % longer for calls with few rows.
    """
    default, left = bench.configs[0], list(bench.configs)

    def gains(calls: int, placements: int) -> dict[Any, list[float]]:
        found: dict[Any, list[float]] = {config: [] for config in left}
        for _ in range(placements):
            times = bench.times(left, calls)
            usual = statistics.median(times[default])
            for config in left:
                found[config].append(usual / statistics.median(times[config]) - 1)
        return found

    for calls, placements, keeps, within in _ROUNDS:
        of = {config: statistics.median(found) for config, found in gains(calls, placements).items()}
        order = sorted(left, key=lambda config: -of[config])
        kept = [config for config in order[:keeps] if (1 + of[config]) * within >= 1 + of[order[0]]]
        left = list(dict.fromkeys((default, *kept)))
    found = gains(_LAST_CALLS, _LAST_PLACEMENTS)
    few = bench.times(left, _FEW_REPETITIONS, _FEW_ROWS)
    most = MOST_OF_FEW * statistics.median(few[default])
    for config in sorted(left, key=lambda config: -statistics.median(found[config])):
        gain, spread = statistics.median(found[config]), (max(found[config]) - min(found[config])) / 2
        enough = gain >= max(_LEAST_GAIN, 2 * spread) and statistics.median(few[config]) <= most
        if enough and bench.takes_unaligned(config):
            return config, gain, spread
    return default, 0.0, 0.0


def _gpu_bench(request: Request, device: int) -> Bench:
    from .tuner_bench import GpuBench  # needs the driver's bindings

    return GpuBench(request, device, most=_MOST_CONFIGURATIONS)


def tune(
    requests: Iterable[Request],
    device: int,
    path: str | None = None,
    minutes: float = 3.0,
    again: bool = False,
    progress: Progress | None = None,
    bench_of: Callable[[Request, int], Bench] = _gpu_bench,
) -> tuple[list[TuneRecord], list[Request]]:
    """Time the configurations of requests on a GPU, and write the fastest ones to its tuning file.

    The file is written after each request: what was measured stays, and is not measured again. The disk cache gets the
    requests' kernels by their fastest configurations, for whole rows and for unaligned ones.

    Parameters
    ----------
    requests : iterable of Request
        What operators are asked for. Those of one case, such as of two data types of one size, are measured once.
    device : int
        The GPU's ordinal.
    path : str, optional
        The file; by default the device's, beside the disk cache.
    minutes : float
        No request is begun after so many.
    again : bool
        Whether to measure what is in the file, too.
    progress : callable, optional
        As `Progress` says.
    bench_of : callable, optional
        Makes what times a request's configurations; `GpuBench` by default.

    Returns
    -------
    tuple of list
        A record of each case that was measured, is in the file or could not be measured; and a request of each that
        the time did not suffice for.

    Raises
    ------
    SettingsError
        If there is no folder for the file, files are ignored, the file cannot be written, or the environment forces
        general kernels.
    ArgumentError
        If a file is there that is none, or is another device's.
    """
    on = Gpu(device)
    file = _File(path or tuning.file_for(on.product), on.product, on.limits)
    start, records, left = time.monotonic(), list[TuneRecord](), list[Request]()
    cases = _by_case(requests)
    tell = progress or (lambda *_: None)
    tell(None, 0, len(cases))
    try:
        with using("rtc"):
            for request, *others in cases:
                row = None if again else file.row(request)
                record = None if row is None else _record(request, row, on.limits)
                if record is None:
                    if time.monotonic() - start > 60 * minutes:
                        left.append(request)
                        continue
                    record = _measure(request, device, on.limits, bench_of)
                    if record.row is not None:
                        file.add(record.row)
                if record.row is not None:
                    _keep((request, *others), record.row, on.limits)
                records.append(record)
                tell(record, len(records), len(cases))
    finally:
        tuning.forget()
        tell(None, len(records), len(records))
    return records, left


def _by_case(requests: Iterable[Request]) -> list[list[Request]]:
    """Return requests of whole rows, those together that have one row of a file."""
    found: dict[object, list[Request]] = {}
    for request in requests:
        family = declaration_of(request.operator).family
        found.setdefault((family.name, family.case(request)), []).append(request._replace(unaligned=False))
    return list(found.values())


def _record(request: Request, row: TuningRow, limits: DeviceLimits) -> TuneRecord | None:
    """Return the record of a file's row; None: it has a configuration of another version, which does not fit."""
    default = declaration_of(request.operator).family.configurations(request, limits)[0]
    config = default if row.config is None else tuning.config_of(request, limits, row.config)
    return None if config is None else TuneRecord(request, row, config.symbol, default.symbol)


def _measure(
    request: Request, device: int, limits: DeviceLimits, bench_of: Callable[[Request, int], Bench]
) -> TuneRecord:
    """Return what was found for a request, or why nothing was."""
    began = time.monotonic()
    default = declaration_of(request.operator).family.configurations(request, limits)[0]
    try:
        bench = bench_of(request, device)
        try:
            config, gain, spread = fastest(bench)
        finally:
            bench.close()
    except (CompileError, LaunchError) as error:
        return TuneRecord(request, None, "", default.symbol, problem=str(error))
    except DriverError as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
        return TuneRecord(request, None, "", default.symbol, problem=str(error))
    values = None if config == bench.configs[0] else values_of(config)
    row = TuningRow(request, values, round(gain, 4), round(spread, 4))
    return TuneRecord(request, row, config.symbol, default.symbol, len(bench.configs), time.monotonic() - began)


def _keep(requests: Sequence[Request], row: TuningRow, limits: DeviceLimits) -> None:
    """Have the disk cache keep the kernels of requests."""
    for request in requests:
        config = None if row.config is None else tuning.config_of(request, limits, row.config)
        for unaligned in (False, True):
            asked = request._replace(unaligned=unaligned)
            for spec, _ in declaration_of(request.operator).family.specialise(asked, limits, config):
                manager.image(spec, Target(limits.architecture))


class _File:
    """A tuning file that several processes may write."""

    def __init__(self, path: str | None, device: str, limits: DeviceLimits) -> None:
        if path is None:
            raise SettingsError(
                "there is no tuning file to write: TRANSFORMER_RTC_TUNING is off, or TRANSFORMER_RTC_CACHE_DIR is empty"
            )
        self._path, self._device, self._limits = path, device, limits
        self._write(lambda known: known)  # at once: before anything is measured, it is known whether it can be

    def row(self, request: Request) -> TuningRow | None:
        """Return what the file has of a request now."""
        return self._read().row(request)

    def add(self, row: TuningRow) -> None:
        """Write a row, in place of one of the same case."""

        def with_row(known: Tuning) -> Tuning:
            others = (one for one in known.rows if one is not known.row(row.request))
            return Tuning(self._device, self._limits.architecture, (*others, row))

        self._write(with_row)

    def _read(self) -> Tuning:
        if not os.path.exists(self._path):
            return Tuning(self._device, self._limits.architecture)
        found = tuning.read(self._path)
        if found.device != self._device:
            raise ArgumentError(f"the tuning file {self._path} is of {found.device}, and this device is {self._device}")
        return found

    def _write(self, change: Callable[[Tuning], Tuning]) -> None:
        try:
            make_folders(os.path.dirname(os.path.abspath(self._path)))
            lock = open_held(f"{self._path}.lock", os.O_RDWR)
            try:
                with contextlib.suppress(OSError):  # where there are no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                tuning.write(self._path, change(self._read()))
            finally:
                close(lock)
        except OSError as error:
            raise SettingsError(f"the tuning file {self._path} cannot be written: {error}") from error
