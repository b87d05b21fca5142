"""What calls ask operators for, how kernels are launched, and what operators there are. A leaf: no CUDA, no files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .declaration import Array, Declaration, Input, Output, OutputWanted
from .errors import ArgumentError, shown
from .spec import DTYPES, DeviceLimits, DType, Field, KernelSpec, Params, TextSpec

__all__ = [
    "MOST_COLUMNS",
    "Asked",
    "Family",
    "LaunchRule",
    "ManifestEntry",
    "Request",
    "StaticKernel",
    "check_request",
    "columns_of",
    "declaration_of",
    "declarations",
    "declare",
    "line",
    "operator_names",
    "parse",
]

# The most columns of a row.
MOST_COLUMNS = 1 << 30


class Request(NamedTuple):
    """What a call asks of its operator's family.

    Attributes
    ----------
    operator : str
        The operator's name.
    dtypes : dict of str to DType or None
        Of each array; None where it is absent or not wanted.
    columns : int
        Of a row; where an operator has buckets, of the longest one of the bucket.
    per_head : bool
        Whether arrays that may have one of two shapes have the second: one element for each head and column.
    margin : bool
        Whether multiprocessors are to be left free: the launch over rows must be persistent.
    flags : frozenset of str
        The flags that are set.
    """

    operator: str
    dtypes: dict[str, DType | None]
    columns: int
    per_head: bool
    margin: bool
    flags: frozenset[str] = frozenset()


class Asked(NamedTuple):
    """A request, and the most CTAs that might share a row: what decides which kernels a device needs.

    Attributes
    ----------
    request : Request
        What an operator was asked for.
    max_ctas_per_row : int
        Fewer than usual where a part of a GPU could not hold so many together.
    """

    request: Request
    max_ctas_per_row: int = DeviceLimits._field_defaults["max_ctas_per_row"]


class LaunchRule(NamedTuple):
    """How a kernel is launched, but for the number of rows.

    Attributes
    ----------
    threads : int
        Of a CTA.
    rows_per_cta, ctas_per_row : int
        So many CTAs have so many rows at a time.
    clusters : bool
        Whether the CTAs of a row are a cluster; else, if there are several, the launch is cooperative.
    dynamic_shared_memory : int
        Bytes of a CTA.
    workspace_bytes : int
        Of each group of CTAs that shares rows, zeroed before the first launch.
    partial_bytes : int
        Of each such group, for what later launches read; not zeroed.
    turn_bytes : int
        Of a persistent launch: to write and read again so many bytes of these takes about as long as one more row for
        each group, so there are fewer groups than may be resident where that saves time; 0: there are not.
    row_bytes : int
        Of each row, likewise.
    persistent : bool
        Whether there are no more groups than are resident together, and each takes rows in turn. Those of a cooperative
        launch always do.
    whole : str
        The dimension next to the columns, if the groups must be so many that each gets rows of the same of its elements
        again and again, as it keeps what belongs to them.
    group_unit : int
        Groups that take rows in turn are a multiple of it, if there are more: then all rows of a group lie alike, as
        far as their alignment goes.
    early : bool
        Whether it may begin before the launch before it on its stream, whatever that is, has ended: its kernel waits
        for that by itself, where it is compiled for an architecture that can (programmatic dependent launch).
    columns_per_cta : int
        Of a launch that follows the first: so many columns have a CTA in x; 0: none has.
    per : str
        Of such a launch: the dimension of which each element has a CTA, in y, or where columns have none, in x.
    rows_of : str
        Of such a launch: the result over whose rows y goes, which has the shape of an array that is broadcast.
    spread_ctas : int
        Of such a launch: how many CTAs it has where no more of them shall share a multiprocessor than must. Else those
        that begin early all go where CTAs of the first launch have left first. So they ask for shared memory that they
        do not use: `dynamic_shared_memory`, half of a multiprocessor's, or less where several must share one. 0
        elsewhere.
    row_groups : int
        Of a launch with `rows_of`: how many groups of threads a CTA has, or a cluster of `ctas_per_row` in y. As many
        of them share the rows that a row of the result was broadcast to as these are worth, a power of two, and y has
        CTAs for all rows of the result, or as many CTAs as it may have; 0 elsewhere.
    """

    threads: int
    rows_per_cta: int = 1
    ctas_per_row: int = 1
    clusters: bool = False
    dynamic_shared_memory: int = 0
    workspace_bytes: int = 0
    partial_bytes: int = 0
    turn_bytes: int = 0
    row_bytes: int = 0
    persistent: bool = False
    columns_per_cta: int = 0
    per: str = ""
    rows_of: str = ""
    spread_ctas: int = 0
    whole: str = ""
    group_unit: int = 1
    early: bool = False
    row_groups: int = 0

    @property
    def cooperative(self) -> bool:
        """Whether all CTAs are resident together."""
        return self.ctas_per_row > 1 and not self.clusters


class StaticKernel(NamedTuple):
    """An entry of a family's static module."""

    symbol: str
    params: Params


class Family(Protocol):
    """What a family of operators provides: pure functions of a request and a device's limits.

    A call may take several launches, one after the other: the first is over the rows, and others over the columns or
    another dimension.
    """

    name: str

    def check(self, request: Request) -> None:
        """Refuse what data types, presence and flags alone tell to be wrong.

        Raises
        ------
        ArgumentError
            If it asks for what the operator does not do.
        """
        ...

    def specialise(self, request: Request, limits: DeviceLimits) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        """Return the kernels of a request.

        Raises
        ------
        ArgumentError
            If it asks for what the operator does not do.
        """
        ...

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        """Return the general kernels of a request.

        Raises
        ------
        ArgumentError
            If it asks for what the operator does not do.
        """
        ...

    def static_program(self) -> str:
        """Return the text of the module of general kernels."""
        ...


# ---- What operators there are ----------------------------------------------------------------------------------------

_declarations: dict[str, Declaration] = {}


def declare(declaration: Declaration) -> None:
    """Add an operator to those that there are."""
    _declarations[declaration.name] = declaration


def declarations() -> dict[str, Declaration]:
    """Return every public function's declaration by its name, those that call another one's operator included."""
    return dict(_declarations)


def declaration_of(operator: str) -> Declaration:
    """Return an operator's declaration."""
    return _declarations[operator]


def operator_names() -> list[str]:
    """Return the names of all operators, without functions that call another one's."""
    return [name for name, declaration in _declarations.items() if not declaration.alias_of]


def columns_of(operator: str, columns: int) -> int:
    """Return with which number of columns rows of so many are asked for.

    Raises
    ------
    ArgumentError
        If no row may have so many.
    """
    if not 1 <= columns <= MOST_COLUMNS:
        raise ArgumentError(f"{operator}: a hidden size is {columns}; it must be from 1 to {MOST_COLUMNS}")
    return next((bucket for bucket in declaration_of(operator).buckets if bucket >= columns), columns)


def _of_heads(declaration: Declaration) -> list[Array]:
    """Return the inputs that may have one of two shapes, the second with one row for each head."""
    two = (array for array in declaration.arrays if isinstance(array, Input))
    return [array for array in two if len(declaration.shapes(array)) > 1 and declaration.shapes(array)[0].sizes]


def check_request(request: Request) -> None:
    """Refuse what no call of the operator could ask for.

    Raises
    ------
    ArgumentError
        If it is so.
    """
    name = request.operator
    declaration = declaration_of(name)
    for array in declaration.arrays:
        dtype = request.dtypes[array.name]
        if dtype is None:
            required = isinstance(array, Input) and not array.optional
            if required or (isinstance(array, Output) and not declaration.about(OutputWanted, array.name)):
                raise ArgumentError(f"{name}: {array.name} must have a data type")
        elif dtype not in array.dtypes:
            accepted = ", ".join(other.name for other in array.dtypes)
            raise ArgumentError(f"{name}: {array.name} must be one of {accepted}; it is {dtype.name}")
    of_heads = _of_heads(declaration)
    if request.per_head and not any(request.dtypes[array.name] for array in of_heads):
        names = " or ".join(f"a {array.name}" for array in of_heads) or "an array"
        raise ArgumentError(f"{name}: per_head needs {names}, which each head has of its own")


# ---- Lines of a manifest ---------------------------------------------------------------------------------------------

_MOST_CTAS: int = DeviceLimits._field_defaults["max_ctas_per_row"]
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
_KERNEL_FIELDS = {"kernel", "text", "fields", "options"}
_FIELDS = {"operator", "dtypes", "columns", "per_head", "margin", "flags", "max_ctas_per_row"}


# A line of a manifest: what an operator was asked for, or a caller's own kernel.
ManifestEntry = Asked | TextSpec


def line(entry: ManifestEntry) -> str:
    """Return an entry's line, without what is absent."""
    if isinstance(entry, TextSpec):
        pairs = [[field.name, field.type] for field in entry.fields]
        return json.dumps({"kernel": entry.name, "text": entry.text, "fields": pairs, "options": list(entry.options)})
    request = entry.request
    fields: dict[str, object] = {
        "operator": request.operator,
        "dtypes": {name: dtype.name for name, dtype in request.dtypes.items() if dtype},
        "columns": request.columns,
        "per_head": request.per_head,
        "margin": request.margin,
    }
    if request.flags:
        fields["flags"] = sorted(request.flags)
    if entry.max_ctas_per_row != _MOST_CTAS:
        fields["max_ctas_per_row"] = entry.max_ctas_per_row
    return json.dumps(fields)


def parse(text: str, where: str = "a manifest's line") -> ManifestEntry:
    """Return the entry of a line.

    Parameters
    ----------
    text : str
        The line.
    where : str
        What a message calls it.

    Raises
    ------
    ArgumentError
        If it is no line of a manifest.
    """

    def refuse(what: str) -> ArgumentError:
        return ArgumentError(f"{where}: {what}")

    if not isinstance(text, str):
        raise refuse(f"it is {shown(text)}, and no text")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is no JSON: {error}") from None
    if isinstance(fields, dict) and fields.keys() == _KERNEL_FIELDS:
        return _parse_kernel(fields, refuse)
    if not isinstance(fields, dict) or not {"operator", "dtypes", "columns"} <= fields.keys() <= _FIELDS:
        raise refuse(
            "it must be an object with operator, dtypes and columns, and perhaps per_head, margin, flags and "
            f"max_ctas_per_row; or with {', '.join(sorted(_KERNEL_FIELDS))}; it is {text.strip()[:200]}"
        )
    name, given = fields["operator"], fields["dtypes"]
    if not isinstance(name, str) or name not in operator_names():
        raise refuse(f"operator is {name!r}; it must be one of {', '.join(operator_names())}")
    declaration = declaration_of(name)
    names = [array.name for array in declaration.arrays]
    if not isinstance(given, dict) or not given.keys() <= set(names):
        raise refuse(f"dtypes is {given!r}; it must have data types of {', '.join(names)}")
    for array, dtype in given.items():
        if dtype is not None and not (isinstance(dtype, str) and dtype in _BY_NAME):
            raise refuse(f"the data type of {array} is {dtype!r}; it must be one of {', '.join(_BY_NAME)}")
    flags = {flag: fields.get(flag, False) for flag in ("per_head", "margin")}
    numbers = {"columns": fields["columns"], "max_ctas_per_row": fields.get("max_ctas_per_row", _MOST_CTAS)}
    for field, value, kind in (
        *((field, value, bool) for field, value in flags.items()),
        *((field, value, int) for field, value in numbers.items()),
    ):
        if type(value) is not kind:
            raise refuse(f"{field} is {value!r}; it must be {'true or false' if kind is bool else 'an integer'}")
    if not 1 <= numbers["max_ctas_per_row"] <= _MOST_CTAS:
        raise refuse(f"max_ctas_per_row is {numbers['max_ctas_per_row']}; it must be from 1 to {_MOST_CTAS}")
    dtypes = {array: _BY_NAME[given[array]] if given.get(array) else None for array in names}
    flagged = fields.get("flags", [])
    if not isinstance(flagged, list) or not all(flag in declaration.flags for flag in flagged):
        raise refuse(f"flags is {flagged!r}; it must be some of: {', '.join(declaration.flags) or 'none'}")
    try:
        columns = columns_of(name, numbers["columns"])
        request = Request(name, dtypes, columns, flags["per_head"], flags["margin"], frozenset(flagged))
        check_request(request)
    except ArgumentError as error:
        raise refuse(str(error)) from None
    return Asked(request, numbers["max_ctas_per_row"])


def _parse_kernel(fields: dict[str, Any], refuse: Callable[[str], ArgumentError]) -> TextSpec:
    name, text, pairs, options = (fields[field] for field in ("kernel", "text", "fields", "options"))
    if not isinstance(options, list):
        raise refuse(f"options is {options!r}; it must be strings")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs
    ):
        raise refuse(f"fields is {pairs!r}; it must be pairs of a name and a type")
    try:
        return TextSpec(text, name, tuple(Field(*pair) for pair in pairs), tuple(options))
    except ArgumentError as error:
        raise refuse(str(error)) from None
