"""Finds the fastest configurations on a GPU, and writes them to its tuning file."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from . import tuning
from .declaration import declaration_of
from .device import Gpu
from .errors import ArgumentError, SettingsError
from .kernel_manager import manager
from .manifest import request_fields
from .request import Request
from .spec import DeviceLimits, Target
from .tuning import Tuning, TuningRow, values_of

__all__ = ["Bench", "TuneRecord", "document", "fastest", "progress_shown", "sentence", "tune"]

# Each round times what is left of the round before: so many calls of each, at so many placements; and keeps so many,
# of those within this of the fastest.
_ROUNDS = ((3, 1, 24, 1.10), (7, 1, 6, 1.03), (11, 4, 1, 1.0))
# A row is written where it gains so much, and more than twice the spread of the gain.
_LEAST_GAIN = 0.02
# A call with few rows may take so many times what it takes by the default configuration.
_FEW_ROWS, _FEW_REPETITIONS, _MOST_OF_FEW = 16, 25, 1.10


class Bench(Protocol):
    """What times the configurations of a request: the default one is the first of `configs`."""

    configs: Sequence[Any]

    def times(self, configs: Sequence[Any], repetitions: int, rows: int | None = None) -> dict[Any, list[float]]: ...


# Gets each record (None before the first), how many there are by now, and how many there will be.
Progress = Callable[["TuneRecord | None", int, int], None]


class TuneRecord(NamedTuple):
    """What was found for one request.

    Attributes
    ----------
    request : Request
        What an operator is asked for.
    row : TuningRow
        What its tuning file has of it now.
    kernel : str
        The fastest kernel's symbol.
    default : str
        That of the default configuration.
    configurations : int
        How many were timed.
    seconds : float
        What it took; 0: it was in the file.
    """

    request: Request
    row: TuningRow
    kernel: str
    default: str
    configurations: int
    seconds: float


def sentence(record: TuneRecord) -> str:
    """Return what was found, for people."""
    row = record.row
    what = f"{record.request.operator} of {record.request.columns} columns"
    if row.config is None:
        return f"{what}: {record.default} stays"
    return f"{what}: {1 + row.gain:.3f} (+- {row.spread:.3f}) times as fast by {record.kernel} as by {record.default}"


def document(record: TuneRecord) -> dict[str, Any]:
    """Return what was found, of JSON's types."""
    of_row = {name: getattr(record.row, name) for name in ("config", "gain", "spread")}
    return {**record._asdict(), "request": request_fields(record.request), "row": of_row}


def progress_shown() -> Progress:
    """Return what shows a bar by tqdm, or lines where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:

        def show(record: TuneRecord | None, done: int, total: int) -> None:
            if record is not None:
                print(f"[{done}/{total}] {record.seconds:.0f} s  {sentence(record)}", file=sys.stderr)

        return show
    bars: list[Any] = []

    def advance(record: TuneRecord | None, done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="transformer_rtc", unit="request"))
        bars[0].update(done - bars[0].n)
        if done == total:
            bars[0].close()

    return advance


def fastest(bench: Bench) -> tuple[Any, float, float]:
    """Return the fastest configuration, its gain over the default one, and that one's spread.

    In three rounds, each of fewer configurations and of more calls at other placements of the arrays. The default one
    is returned unless another gains 2 % and twice its spread, and calls with few rows are not slower by more than 10 %.
    """
    default, left = bench.configs[0], list(bench.configs)
    ratios: dict[Any, list[float]] = {}
    for repetitions, placements, keeps, within in _ROUNDS:
        ratios = {config: [] for config in left}
        for _ in range(placements):
            times = bench.times(left, repetitions)
            usual = statistics.median(times[default])
            for config, found in times.items():
                ratios[config].append(usual / statistics.median(found))
        order = sorted(left, key=lambda config: -statistics.median(ratios[config]))
        least = statistics.median(ratios[order[0]]) / within
        kept = [config for config in order[:keeps] if statistics.median(ratios[config]) >= least]
        left = list(dict.fromkeys((default, *kept)))
    few = bench.times(list(ratios), _FEW_REPETITIONS, _FEW_ROWS)
    most = _MOST_OF_FEW * statistics.median(few[default])
    best = default
    for config, found in ratios.items():
        gain, spread = statistics.median(found) - 1, (max(found) - min(found)) / 2
        enough = gain >= max(_LEAST_GAIN, 2 * spread) and statistics.median(few[config]) <= most
        if enough and (best is default or gain > statistics.median(ratios[best]) - 1):
            best = config
    return best, statistics.median(ratios[best]) - 1, (max(ratios[best]) - min(ratios[best])) / 2


def _gpu_bench(request: Request, device: int) -> Bench:
    from .tuner_bench import GpuBench  # needs the driver's bindings

    return GpuBench(request, device)


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
    kernels of the configurations that were chosen, for whole rows and for unaligned ones.

    Parameters
    ----------
    requests : iterable of Request
        What operators are asked for.
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
        A record of each request that was measured or is in the file; and the requests that the time did not suffice
        for.

    Raises
    ------
    SettingsError
        If there is no folder for the file, or files are ignored.
    ArgumentError
        If a file is there that is none, or is another device's.
    OSError
        If it cannot be written.
    """
    on = Gpu(device)
    name, limits = on.product, on.limits
    path = path or tuning.file_for(name)
    if path is None:
        raise SettingsError("there is nowhere to write: TRANSFORMER_RTC_TUNING is off, or there is no cache folder")
    start, records, left = time.monotonic(), list[TuneRecord](), list[Request]()
    wanted = _first_of_each_case(requests)
    if progress:
        progress(None, 0, len(wanted))
    for request in wanted:
        # Read anew each time: other processes may tune other requests.
        known = _known(path, name)
        family, row, began, count = declaration_of(request.operator).family, known.row(request), time.monotonic(), 0
        if row is None or again:
            if began - start > 60 * minutes:
                left.append(request)
                continue
            bench = bench_of(request, device)
            count = len(bench.configs)
            config, gain, spread = fastest(bench)
            chosen = None if config == bench.configs[0] else values_of(config)
            row = TuningRow(request, chosen, round(gain, 4), round(spread, 4))
            known = _known(path, name)
            rows = (one for one in known.rows if known.row(request) is not one)
            tuning.write(path, Tuning(name, limits.architecture, (*rows, row)))
        config = tuning.config_of(request, limits, row.config) if row.config else None
        kernel, default = (family.specialise(request, limits, one)[0][0].symbol for one in (config, None))
        if count:
            _keep(request, config, limits)
        records.append(TuneRecord(request, row, kernel, default, count, time.monotonic() - began if count else 0.0))
        if progress:
            progress(records[-1], len(records), len(wanted))
    tuning.forget()
    return records, left


def _first_of_each_case(requests: Iterable[Request]) -> list[Request]:
    """Return requests of whole rows of which no two have one row of a file."""
    found: dict[object, Request] = {}
    for request in requests:
        family = declaration_of(request.operator).family
        found.setdefault((family.name, family.case(request)), request._replace(unaligned=False))
    return list(found.values())


def _keep(request: Request, config: Any, limits: DeviceLimits) -> None:
    family = declaration_of(request.operator).family
    for unaligned in (False, True):
        for spec, _ in family.specialise(request._replace(unaligned=unaligned), limits, config):
            manager.image(spec, Target(limits.architecture))


def _known(path: str, device: str) -> Tuning:
    try:
        with open(path, encoding="utf-8"):
            pass
    except FileNotFoundError:
        return Tuning(device)
    found = tuning.read(path)
    if found.device != device:
        raise ArgumentError(f"the tuning file {path} is of {found.device}, and this device is {device}")
    return found
