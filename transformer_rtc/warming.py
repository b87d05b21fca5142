"""Compile before the first call: what operators, or a manifest of a real run, will ask for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _native, manifest
from .arrays import dtype_id
from .checks import check_flag, is_integer
from .device import device_limits
from .dispatch import forms, operators
from .errors import ArgumentError, DeviceNotFoundError, TransformerRtcError, shown
from .kernel_manager import KernelManager, manager
from .manifest import ManifestEntry
from .request import Argument, Asked, Request
from .spec import ARCHITECTURES, BOOL, DTYPES, DeviceLimits, DType, KernelSpec, Target, TextSpec

__all__ = ["WarmupRecord", "argument_names", "warmup"]


class WarmupRecord(NamedTuple):
    """What a warm-up did for one kernel.

    Attributes
    ----------
    symbol : str
        The kernel.
    architecture : str
        Such as ``"sm_90"``.
    status : str
        ``"compiled"``; ``"cached"``: it was there, or another process has compiled it meanwhile; ``"failed"``.
    milliseconds : float
        What it took.
    error : str
        Why it failed; else empty.
    """

    symbol: str
    architecture: str
    status: str
    milliseconds: float
    error: str = ""


# Roles of results that are added up over rows.
_SUMS = ("column_values", "head_sums", "mask_sums")

# Told of each record, with how many there are by now and will be.
Progress = Callable[[WarmupRecord, int, int], None]


def _names(operator: str) -> dict[str, Argument]:
    """Return the arguments that a warm-up takes for an operator, as its function calls them."""
    found = {}
    for argument in operators()[operator].arguments:
        if argument.role not in ("rows_out", "real", "non_negative", "integer", "square", "sm_margin", "stream"):
            found[argument.keyword] = argument
    return found


def argument_names() -> set[str]:
    """Return the names of all arguments that a warm-up takes for some operator."""
    return {name for operator in operators() for name in _names(operator)}


def _request(
    operator: str, dtype: DType, columns: int, per_head: bool, margin: bool, given: Mapping[str, object]
) -> Request:
    """Return what a call would ask for, as the operator's function completes its arguments."""
    centred = "layer_norm" in operator
    types: dict[str, DType | None] = {}

    def chosen(name: str, value: object, default: DType) -> DType | None:
        if value is None or isinstance(value, bool):
            return default if value else None
        try:
            return DTYPES[dtype_id(value)]
        except ArgumentError:
            raise ArgumentError(
                f"{operator}: {name} is {shown(value)}; it takes a data type, True, False or None"
            ) from None

    def says(name: str, words: Sequence[str] = ()) -> bool | None:
        value = given.get(name)
        if isinstance(value, str) and value in words:
            return True
        if value is not None and not isinstance(value, bool):
            accepted = ", ".join(("True", "False", *map(repr, words)))
            raise ArgumentError(f"{operator}: {name} is {shown(value)}; it takes {accepted} or None")
        return value

    def said_of(argument: Argument, role: str) -> str:
        return next((a.name for a in operators()[operator].arguments if a.role == role and argument.name in a.of), "")

    arrays = manifest.arrays_of(operator)
    for argument in arrays:
        name = argument.name
        like = types.get(argument.like) or types.get(arrays[0].name) or dtype
        if argument.role in ("rows_out", *_SUMS):
            named = said_of(argument, "dtype_out")
            asked = given.get(named)
            kind = chosen(named, True if asked is None else asked, like)
            if argument.role == "rows_out":
                wanted: bool | None = says(said_of(argument, "wanted")) is not False
            else:
                wanted = says(argument.keyword)
                if wanted is None:
                    # As the operators' functions have it: of what is given.
                    wanted = types[argument.like] is not None and (name != "dbias" or centred)
            types[name] = kind if wanted else None
        elif argument.role == "row_values":
            wanted = says(argument.keyword)
            types[name] = argument.dtypes[0] if wanted else None
        else:
            is_there = not argument.optional or name == "weight" or (name == "bias" and centred)
            if argument.role == "value_out":
                is_there = False
            # A mask says by default which elements do not take part; one of which there is a gradient is added.
            default = argument.dtypes[0] if argument.dtypes[0] is BOOL or len(argument.dtypes) == 1 else dtype
            types[name] = chosen(name, given.get(name, is_there), default)
    described = operators()[operator].arguments
    flags = frozenset(a.name for a in described if a.role == "flag" and says(a.name, a.words))
    has_margin = any(a.role == "sm_margin" for a in described)
    columns = manifest.columns_of(operator, columns)
    request = Request(operator, types, columns, per_head, margin and has_margin, flags)
    manifest.check_request(request)
    return request


def _sequence(value: Any, single: tuple[type, ...]) -> list[Any]:
    if isinstance(value, single):
        return [value]
    try:
        return list(value)
    except TypeError:  # it is one
        return [value]


def _requests(
    named: Any, dtypes: Any, hidden_sizes: Any, per_head: bool, margin: bool, arguments: Mapping[str, object]
) -> list[Request]:
    public = forms()
    found: list[Request] = []
    known: set[str] = set()
    sizes = _sequence(hidden_sizes, (int,))
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise ArgumentError(f"hidden_sizes has {shown(size)}; it takes integers")
    kinds = []
    for dtype in _sequence(dtypes, (str, type)):
        try:
            kinds.append(DTYPES[dtype_id(dtype)])
        except ArgumentError as error:
            raise ArgumentError(f"dtypes has {shown(dtype)}: {error}") from None
    functions = _sequence(named, (str,))
    if not functions and (kinds or sizes or arguments):
        raise ArgumentError("dtypes, hidden_sizes and arguments are those of operators, and none is named")
    for operator in functions:
        name = operator if isinstance(operator, str) else getattr(operator, "__name__", None)
        if not isinstance(name, str) or name not in public:
            raise ArgumentError(f"operators has {shown(operator)}; it takes {', '.join(public)}")
        if not kinds or not sizes:
            raise ArgumentError(f"{name} needs dtypes and hidden_sizes, such as 'bfloat16' and 4096")
        own, gives = public[name]
        names = _names(own)
        known.update(names)
        given = dict.fromkeys(gives, True) | {key: value for key, value in arguments.items() if key in names}
        found += [_request(own, dtype, int(size), per_head, margin, given) for dtype in kinds for size in sizes]
    for name in arguments.keys() - known:
        raise ArgumentError(f"{name} is no argument of these operators; they take {', '.join(sorted(known))}")
    return found


def _limits(architectures: Any) -> list[DeviceLimits]:
    if architectures is None:
        try:
            return [device_limits(_native.current_device())]
        except DeviceNotFoundError as error:
            raise type(error)(f"{error}. Without a GPU, name the architectures, such as 'sm_90'") from error
    found = []
    accepted = {f"sm_{number}": limits for number, limits in ARCHITECTURES.items()}
    for name in _sequence(architectures, (str,)):
        if not isinstance(name, str) or name not in accepted:
            raise ArgumentError(f"architectures has {shown(name)}; it takes {', '.join(accepted)}")
        found.append(accepted[name])
    return found


def _show_progress() -> Progress:
    try:
        from tqdm import tqdm
    except ImportError:

        def show(record: WarmupRecord, done: int, total: int) -> None:
            print(
                f"[{done}/{total}] {record.status} {record.symbol} {record.architecture} {record.milliseconds:.0f} ms",
                file=sys.stderr,
            )

        return show
    bars: list[Any] = []

    def advance(record: WarmupRecord, done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="transformer_rtc", unit="kernel"))
        bars[0].update()
        if done == total:
            bars[0].close()

    return advance


def _warm(to: KernelManager, spec: KernelSpec, architecture: int) -> WarmupRecord:
    target = Target(architecture)
    start = time.perf_counter()
    status, error = "cached", ""
    if not to.in_memory(spec, target):
        try:
            status = "compiled" if to.image(spec, target).origin == "compiler" else "cached"
        except TransformerRtcError as failure:
            status, error = "failed", str(failure)
    return WarmupRecord(spec.symbol, str(target), status, (time.perf_counter() - start) * 1e3, error)


def warmup(
    operators: Any = (),
    dtypes: Any = (),
    hidden_sizes: Any = (),
    *,
    manifest: str | os.PathLike[str] | Iterable[ManifestEntry] | None = None,
    architectures: str | Sequence[str] | None = None,
    per_head: bool = False,
    sm_margin: bool = False,
    threads: int | None = None,
    progress: bool | Progress = False,
    **arguments: object,
) -> list[WarmupRecord]:
    """Compile what is missing, so that no later call does.

    ``warmup(rms_norm, "bfloat16", 4096)`` makes the kernels of ``rms_norm(x, weight)``, for rows of that size in any
    number; ``warmup(manifest=path)`` those that a run has used, which `record` has written. Nothing is loaded or run. A
    small GPU, or a part of one, may take other kernels for rows that several CTAs share: record a run there.

    Parameters
    ----------
    operators : callable, str or sequence of them
        This package's operators, or their names.
    dtypes : data type or sequence of them
        Of every array but those that `arguments` names; of any framework, or by name.
    hidden_sizes : int or sequence of int
        Columns of a row. Each operator is compiled for each data type and each size.
    manifest : str, path, or iterable of ManifestEntry, optional
        What else to compile: a file that `record` has written, or what it has yielded.
    architectures : str or sequence of str, optional
        Such as ``"sm_90"``; no GPU is needed. None: the current GPU's.
    per_head : bool
        Whether each head has a weight and bias of its own.
    sm_margin : bool
        Whether calls leave multiprocessors free.
    threads : int, optional
        How many kernels to compile at a time; by default as many as this process may use cores.
    progress : bool or callable
        True shows a bar by tqdm, or lines where it is not installed. A callable gets each `WarmupRecord`, how many
        there are by now, and how many there will be.
    **arguments
        What a call gives besides, by the names that the operators take: True, a data type, or None. ``weight`` is there
        unless it is None, and so is LayerNorm's ``bias``; others are where they are named, such as
        ``weight="float32"``, ``return_rstd=True``, ``out_dtype="float8_e4m3fn"``, ``scale=True``; of softmax,
        ``causal="aligned"``, ``mask="bool"``, ``sink=True``.

    Returns
    -------
    list of WarmupRecord
        One for each kernel and architecture, in the order of what was asked for.

    Raises
    ------
    ArgumentError
        If an argument is not as described, or a call could not be made so; before anything is compiled.
    DeviceNotFoundError, DriverError
        If there is no GPU and no architecture is named.
    """
    if threads is not None and not is_integer(threads, 1, 2**31 - 1):
        raise ArgumentError(f"threads is {shown(threads)}; it takes a positive integer, or None")
    check_flag(per_head, "per_head")
    check_flag(sm_margin, "sm_margin")
    if not isinstance(progress, bool) and not callable(progress):
        raise ArgumentError(f"progress is {shown(progress)}; it takes True, False or a callable")
    entries: list[ManifestEntry] = [
        Asked(request) for request in _requests(operators, dtypes, hidden_sizes, per_head, sm_margin, arguments)
    ]
    entries += _entries(manifest)
    if not entries:
        raise ArgumentError("there is nothing to warm up: give operators, dtypes and hidden_sizes, or a manifest")
    tasks = dict.fromkeys(
        (spec, limits.architecture)
        for limits in _limits(architectures)
        for entry in entries
        for spec in _specialise(entry, limits)
    )
    tell = (_show_progress() if progress is True else progress) or None
    return _run(list(tasks), threads or len(os.sched_getaffinity(0)), tell)


def _entries(given: Any) -> list[ManifestEntry]:
    if given is None:
        return []
    if isinstance(given, (str, os.PathLike)):
        return manifest.read(given)
    found = list(given) if isinstance(given, Iterable) else [given]
    for entry in found:
        if not isinstance(entry, ManifestEntry):
            raise ArgumentError(f"manifest has {shown(entry)}; it takes a file's path, or what record() has yielded")
    return found


def _specialise(entry: ManifestEntry, limits: DeviceLimits) -> list[KernelSpec]:
    if isinstance(entry, TextSpec):
        return [entry]
    limits = limits._replace(max_ctas_per_row=min(limits.max_ctas_per_row, entry.max_ctas_per_row))
    try:
        family = operators()[entry.request.operator].family
        return [spec for spec, _ in family.specialise(entry.request, limits)]
    except ArgumentError as error:
        raise ArgumentError(f"{error}, asked for by {manifest.line(entry)}") from None


def _run(tasks: list[tuple[KernelSpec, int]], threads: int, tell: Progress | None) -> list[WarmupRecord]:
    from concurrent.futures import ThreadPoolExecutor, as_completed  # not at import

    pool = ThreadPoolExecutor(min(threads, len(tasks)), "transformer_rtc.warmup")
    try:
        futures = [pool.submit(_warm, manager, spec, architecture) for spec, architecture in tasks]
        if tell:
            for done, future in enumerate(as_completed(futures), 1):
                tell(future.result(), done, len(tasks))
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
