# SPDX-License-Identifier: Apache-2.0
"""Compile before the first call: what operators, or a manifest of a real run, will ask for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from . import _native, manifest
from .arguments import Argument, Array, Choice, Flag, Input, Margin, Output, OutputDType, OutputWanted, Result, Update
from .arrays import dtype_id
from .checks import check_flag, is_integer, path_of
from .declaration import Declaration, check_request, columns_of, declaration_of, declarations, operator_names
from .device import device_of
from .errors import (
    ArgumentError,
    DeviceNotFoundError,
    TransformerRtcError,
    UnexpectedCompileError,
    choices,
    shown,
)
from .kernel_manager import KernelManager, manager
from .manifest import ManifestEntry, line
from .progress import shown as progress_shown
from .request import Asked, Request
from .settings import settings
from .spec import ARCHITECTURES, DTYPES, DeviceLimits, DType, KernelSpec, Target, TextSpec
from .tuning import EMPTY, Tuning, config_of
from .tuning import read as read_tuning

__all__ = [
    "Progress",
    "WarmupRecord",
    "argument_names",
    "compile_all",
    "kernels_of",
    "record_line",
    "request_of",
    "requests_of",
    "warmup",
]


class WarmupRecord(NamedTuple):
    """What a warm-up did for one kernel.

    Attributes
    ----------
    symbol : str
        The kernel.
    architecture : str
        Such as ``"sm_90"``.
    status : str
        ``"compiled"``; ``"cached"``: it was in a cache, or another process compiled it meanwhile; ``"missing"``: it is
        in no cache, and compiles are forbidden; ``"failed"``.
    milliseconds : float
        What it took.
    error : str
        Why it failed or is missing; else empty.

    Examples
    --------
    >>> from transformer_rtc import WarmupRecord, warmup
    >>> def failures(records: list[WarmupRecord]) -> list[str]:
    ...     return [f"{one.symbol} for {one.architecture}: {one.error}" for one in records if one.status == "failed"]
    >>> failures(warmup("rms_norm", "float32", 8, architectures="sm_90"))
    []
    """

    symbol: str
    architecture: str
    status: str
    milliseconds: float
    error: str = ""


# Told of each record, with how many there are by now and will be.
Progress = Callable[[WarmupRecord, int, int], None]


def _names(operator: str) -> dict[str, Argument]:
    """Return the arguments that a warm-up takes for an operator, as its function calls them."""
    kinds = (Input, Update, Result, OutputDType, OutputWanted, Flag, Choice)
    arguments = declaration_of(operator).arguments
    return {argument.keyword: argument for argument in arguments if isinstance(argument, kinds)}


def argument_names() -> set[str]:
    """Return the names of all arguments that a warm-up takes for some operator."""
    return {name for operator in operator_names() for name in _names(operator)}


class _Given:
    """What a warm-up is told of an operator's arguments."""

    def __init__(self, operator: str, values: Mapping[str, object]) -> None:
        self.operator, self.values = operator, values

    def truth(self, name: str, words: Iterable[str] = ()) -> bool | None:
        """Return whether a flag is set; None: nothing is said of it."""
        value = self.values.get(name)
        if isinstance(value, str) and value in words:
            return True
        if value is not None and not isinstance(value, bool):
            accepted = ", ".join(("True", "False", *map(repr, words)))
            raise ArgumentError(f"{self.operator}: {name} is {shown(value)}; it takes {accepted} or None")
        return value

    def dtype(self, name: str, default: DType, absent: object) -> DType | None:
        """Return an array's data type, the default where it is but said to be there; None: it is not there."""
        value = self.values.get(name, absent)
        if value is None or isinstance(value, bool):
            return default if value else None
        try:
            return DTYPES[dtype_id(value)]
        except ArgumentError:
            raise ArgumentError(
                f"{self.operator}: {name} is {shown(value)}; it takes a data type, True, False or None"
            ) from None


def _dtype_of(
    declaration: Declaration, array: Array, given: _Given, dtype: DType, known: Mapping[str, DType | None]
) -> DType | None:
    """Return the data type of an array as the operator's function would have it; None: it is not there."""
    like = known.get(getattr(array, "like", "")) or known.get(declaration.arrays[0].name) or dtype
    if declaration.broadcasts and isinstance(array, Output):
        # Where torch has no such promotion, a call is told y's type; so is a warm-up, or the family refuses it.
        promoted = reduce(_native.promoted, (one.id for name in declaration.broadcasts if (one := known[name])))
        like = DTYPES.get(promoted, like)
    if isinstance(array, Input):
        default = array.usual_dtype or (array.dtypes[0] if len(array.dtypes) == 1 else dtype)
        return given.dtype(array.keyword, default, not array.optional or array.usual)
    if isinstance(array, Update):
        return given.dtype(array.keyword, array.dtypes[0], None)
    named = declaration.about(OutputDType, array.name)
    found: DType | None = array.dtypes[0] if len(array.dtypes) == 1 else like
    if named is not None and given.values.get(named.keyword) is not None:
        found = given.dtype(named.keyword, like, None)
    if isinstance(array, Result):
        wanted = given.truth(array.keyword)
        if wanted is None:
            wanted = bool(array.wanted_with) and known[array.wanted_with] is not None
    else:
        about = declaration.about(OutputWanted, array.name)
        wanted = about is None or given.truth(about.keyword) is not False
    return found if wanted else None


def request_of(
    operator: str, dtype: DType, columns: int, per_head: bool, margin: bool, values: Mapping[str, object]
) -> Request:
    """Return what a call would ask for, as the operator's function completes its arguments."""
    declaration, given = declaration_of(operator), _Given(operator, values)
    types: dict[str, DType | None] = {}
    for array in declaration.arrays:
        types[array.name] = _dtype_of(declaration, array, given, dtype, types)
    flags = frozenset(
        argument.name
        for argument in declaration.arguments
        if isinstance(argument, (Flag, Choice)) and given.truth(argument.keyword, getattr(argument, "words", ()))
    )
    has_margin = any(isinstance(argument, Margin) for argument in declaration.arguments)
    columns = columns_of(operator, columns)
    request = Request(operator, types, columns, per_head, margin and has_margin, flags)
    check_request(request)
    return request


def _sequence(value: Any, single: tuple[type, ...]) -> list[Any]:
    if isinstance(value, single):
        return [value]
    try:
        return list(value)
    except TypeError:  # it is one
        return [value]


def _columns_of_every_length(
    function: str, dtype: DType, per_head: bool, margin: bool, given: Mapping[str, object]
) -> int:
    """Return a number of columns whose kernel serves every length.

    Raises
    ------
    ArgumentError
        If other lengths have other kernels.
    """
    declaration = declarations()[function]
    sizes = [min(bucket, declaration.most_columns) for bucket in declaration.buckets]
    kernels = set()
    for size in sizes:
        request = request_of(declaration.operator, dtype, size, per_head, margin, given)
        kernels.add(declaration.family.specialise(request, ARCHITECTURES[90])[0][0])
    if len(kernels) != 1:
        raise ArgumentError(f"{function} needs dtypes and hidden_sizes, such as 'bfloat16' and 4096")
    return sizes[0]


def _requests(
    named: Any,
    dtypes: Any,
    hidden_sizes: Any,
    per_head: bool,
    margin: bool,
    arguments: Mapping[str, object],
    every_length: bool = False,
) -> list[Request]:
    public = declarations()
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
            raise ArgumentError(f"operators has {shown(operator)}{choices(name, public)}")
        if not kinds or not (sizes or every_length):
            raise ArgumentError(f"{name} needs dtypes and hidden_sizes, such as 'bfloat16' and 4096")
        own = public[name].operator
        names = _names(own)
        known.update(names)
        given = dict.fromkeys(public[name].always, True) | {
            key: value for key, value in arguments.items() if key in names
        }
        for dtype in kinds:
            for size in sizes or [_columns_of_every_length(name, dtype, per_head, margin, given)]:
                found.append(request_of(own, dtype, int(size), per_head, margin, given))
    for name in arguments.keys() - known:
        raise ArgumentError(f"{name} is no argument of these operators{choices(name, sorted(known))}")
    return found


def _targets(architectures: Any, tuning: Tuning | None) -> list[tuple[DeviceLimits, Tuning]]:
    """Return what to compile for: the limits, and what was measured of the configurations there."""
    if architectures is None:
        try:
            device = device_of(_native.current_device())
            found = [(device.limits, tuning or device.tuning)]
        except DeviceNotFoundError as error:
            raise type(error)(f"{error}. Without a GPU, give architectures, such as 'sm_90'") from error
    else:
        accepted = {f"sm_{number}": limits for number, limits in ARCHITECTURES.items()}
        found = []
        for name in _sequence(architectures, (str,)):
            if not isinstance(name, str) or name not in accepted:
                raise ArgumentError(f"architectures has {shown(name)}; it takes {', '.join(accepted)}")
            found.append((accepted[name], tuning or EMPTY))
    if tuning and tuning.architecture not in {limits.architecture for limits, _ in found}:
        names = ", ".join(f"sm_{limits.architecture}" for limits, _ in found)
        raise ArgumentError(f"tuning is a file for sm_{tuning.architecture} ({tuning.device}), and not for {names}")
    return [(limits, of if limits.architecture == of.architecture else EMPTY) for limits, of in found]


def record_line(record: WarmupRecord) -> str:
    """Return what a line of progress says of a kernel."""
    return f"{record.status} {record.symbol} {record.architecture} {record.milliseconds:.0f} ms"


def _warm(to: KernelManager, spec: KernelSpec, architecture: int, cubins: bool) -> WarmupRecord:
    target = Target(architecture)
    start = time.perf_counter()
    status, error = "cached", ""
    if not to.in_memory(spec, target):
        try:
            status = "compiled" if to.image(spec, target, cubins).origin == "compiler" else "cached"
        except UnexpectedCompileError as miss:
            status, error = "missing", miss.reason
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
    unaligned: bool = True,
    tuning: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: bool | Progress = False,
    **arguments: object,
) -> list[WarmupRecord]:
    """Compile what is missing, so that no later call does.

    ``warmup(rms_norm, "bfloat16", 4096)`` compiles the kernels of ``rms_norm(x, weight)``, for any number of rows of
    that size. ``warmup(manifest=path)`` compiles the kernels of a run that `record` has written. Nothing is loaded or
    run. A small GPU, or a part of one, may use other kernels for rows that several CTAs share: record its run on it.

    Parameters
    ----------
    operators : callable, str or sequence of them
        This package's operators, or their names.
    dtypes : data type or sequence of them
        The data types of all arrays except those that `arguments` names; of any framework, or by name.
    hidden_sizes : int or sequence of int
        Columns of a row. Each operator is compiled for each data type and each size. `add`, and activations without a
        scale for each row, need no size, because their kernels serve every length.
    manifest : str, path, or iterable of ManifestEntry, optional
        Further kernels to compile: a file that `record` has written, or the list that it has yielded.
    architectures : str or sequence of str, optional
        Architectures such as ``"sm_90"``. They need no GPU, but an NVRTC that supports them. None: the current GPU's.
    per_head : bool
        Whether each head has a weight and bias of its own.
    sm_margin : bool
        Whether calls leave multiprocessors free.
    unaligned : bool
        Whether to compile each call's kernel for unaligned rows as well. These are rows that begin at no multiple of 16
        bytes, such as those of slices, and lengths of softmax that are no whole vectors. False: only the kernels that
        a manifest's lines name, and for described calls those of aligned rows.
    tuning : str or path, optional
        A tuning file, which ``transformer-rtc tune`` has written. For its architecture, the kernels of its
        configurations are compiled. By default it is the current GPU's file, if there is one, and none if
        `architectures` are named. A configuration in a manifest's line has priority.
    threads : int, optional
        How many kernels to compile at a time. By default it is the number of cores that this process may use.
    progress : bool or callable
        True shows a bar by tqdm, or lines where it is not installed. A callable gets each `WarmupRecord`, how many
        there are by now, and how many there will be.
    **arguments
        Optional arguments of the calls, by their names in the operators: True, a data type, or None. By default calls
        have ``weight``, and LayerNorm's ``bias``; None leaves one out. Calls have other arguments only if they are
        named: ``weight="float32"``, ``return_rstd=True``, ``out_dtype="float8_e4m3fn"``, ``scale=True``, or of softmax
        ``causal="aligned"``, ``mask="bool"``, ``sink=True``.

    Returns
    -------
    list of WarmupRecord
        One record for each kernel and architecture, in the order of the request.

    Raises
    ------
    ArgumentError
        If an argument is not as described, or a call could not be made so; before anything is compiled.
    DeviceNotFoundError, DriverError
        If there is no GPU and no architecture is named.
    SettingsError
        If an environment variable has a value that it does not take.

    Examples
    --------
    >>> from transformer_rtc import rms_norm, warmup
    >>> records = warmup(rms_norm, "float32", 8, architectures="sm_90")  # for aligned rows, and for unaligned ones
    >>> [(one.architecture, one.error) for one in records]
    [('sm_90', ''), ('sm_90', '')]
    >>> [one.status for one in warmup(rms_norm, "float32", 8, architectures="sm_90")]
    ['cached', 'cached']
    """
    if threads is not None and not is_integer(threads, 1, 2**31 - 1):
        raise ArgumentError(f"threads is {shown(threads)}; it takes a positive integer, or None")
    check_flag(per_head, "per_head")
    check_flag(sm_margin, "sm_margin")
    check_flag(unaligned, "unaligned")
    if not isinstance(progress, bool) and not callable(progress):
        raise ArgumentError(f"progress is {shown(progress)}; it takes True, False or a callable")
    asked = _requests(operators, dtypes, hidden_sizes, per_head, sm_margin, arguments, every_length=True)
    entries: list[ManifestEntry] = list(map(Asked, asked))
    entries += _entries(manifest)
    if not entries:
        raise ArgumentError("there is nothing to warm up: give operators, dtypes and hidden_sizes, or a manifest")
    settings.check()
    targets = _targets(architectures, None if tuning is None else read_tuning(path_of(tuning, "tuning")))
    tasks = dict.fromkeys(
        (spec, limits.architecture)
        for limits, measured in targets
        for entry in entries
        for spec in kernels_of(entry, limits, unaligned, measured)
    )
    tell = (progress_shown("kernel", record_line) if progress is True else progress) or None
    # The driver of a GPU that is newer than NVRTC compiles PTX; for one that is not here, it would be of no use.
    cubins = architectures is not None
    return compile_all(manager, list(tasks), threads or len(os.sched_getaffinity(0)), tell, cubins)


def requests_of(
    operators: Any, dtypes: Any, hidden_sizes: Any, *, manifest: Any, per_head: bool, **arguments: object
) -> list[Request]:
    """Return what calls of operators ask for, described as `warmup` takes it, but always with hidden sizes.

    Raises
    ------
    ArgumentError
        If an argument is not as described, or there is nothing to ask for.
    """
    found = _requests(operators, dtypes, hidden_sizes, per_head, False, arguments)
    found += [entry.request for entry in _entries(manifest) if isinstance(entry, Asked)]
    if not found:
        raise ArgumentError("there is nothing to tune: give operators, dtypes and hidden_sizes, or a manifest")
    return found


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


def kernels_of(
    entry: ManifestEntry, limits: DeviceLimits, unaligned: bool = False, tuning: Tuning = EMPTY
) -> list[KernelSpec]:
    """Return the kernels of an entry; with `unaligned`, of whole rows and of others, however it says that they lie."""
    if isinstance(entry, TextSpec):
        return [entry]
    kinds = (False, True) if unaligned else (entry.request.unaligned,)
    limits = limits._replace(max_ctas_per_row=min(limits.max_ctas_per_row, entry.max_ctas_per_row))
    try:
        family = declaration_of(entry.request.operator).family
        config = config_of(entry.request, limits, entry.config) if entry.config else None
        config = config or tuning.config(entry.request, limits)
        requests = [entry.request._replace(unaligned=kind) for kind in kinds]
        return [spec for request in requests for spec, _ in family.specialise(request, limits, config)]
    except ArgumentError as error:
        raise ArgumentError(f"{error}, asked for by {line(entry)}") from None


def compile_all(
    to: KernelManager, tasks: list[tuple[KernelSpec, int]], threads: int, tell: Progress | None, cubins: bool = True
) -> list[WarmupRecord]:
    """Have a manager compile kernels for architectures, several at a time; what fails is told of in its record.

    With `cubins`, a kernel of which NVRTC could make only PTX fails.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed  # not at import

    pool = ThreadPoolExecutor(min(threads, len(tasks)), "transformer_rtc.warmup")
    try:
        futures = [pool.submit(_warm, to, spec, architecture, cubins) for spec, architecture in tasks]
        if tell:
            for done, future in enumerate(as_completed(futures), 1):
                tell(future.result(), done, len(tasks))
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
