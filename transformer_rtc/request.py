"""What an operator declares, what a call asks of it, and how its kernels are launched. A leaf: no CUDA, no files."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .spec import DeviceLimits, DType, KernelSpec, Params

__all__ = ["MOST_COLUMNS", "OF_HEADS", "Argument", "Asked", "Family", "LaunchRule", "Request", "StaticKernel"]

MOST_COLUMNS = 2**30  # of a row; the native module's checks have the same number


class Argument(NamedTuple):
    """An argument of an operator's call.

    Attributes
    ----------
    name : str
        As the user knows it.
    role : str
        An input array: ``"rows"``, [..., columns], and the first argument is one; ``"columns"``, [columns], or
        [heads, columns] where rows are [..., heads, columns]; ``"row_inputs"``, [...], one value a row; ``"value"``,
        one element; ``"mask"``, [..., columns], broadcast to rows [..., heads, queries, columns];
        ``"head_values"``, [heads], of such rows.
        An output: ``"rows_out"``, an array like the first input, allocated where the caller gives none;
        ``"value_out"``, one element that is written where the caller gives it, and not returned; ``"row_values"``,
        whether to return an array [...] with one value a row; ``"column_values"``, whether to return an array of the
        shape of the columns; ``"head_sums"``, whether to return an array [heads], of rows [..., heads, queries,
        columns]; ``"mask_sums"``, whether to return an array of the shape of the mask that it is like, for which inputs
        of rows are read again when outputs of rows are written. What is said of outputs: ``"dtype_out"``, their data
        type; ``"wanted"``, whether they are made and returned. Others: ``"real"``, a float; ``"non_negative"``, one
        that is not below 0; ``"integer"``, an int of 32 bits; ``"flag"``, whether a kernel is one of its kind;
        ``"square"``, whether there must be as many queries as columns; ``"sm_margin"``, how many multiprocessors to
        leave free; ``"stream"``.
    dtypes : tuple of DType
        What an array may hold; of ``"row_values"``, the one it holds.
    optional : bool
        Whether an input array may be None.
    like : str
        The earlier array whose data type an output has by default; the first one where it is empty or None.
    of : tuple of str
        The outputs that ``"dtype_out"`` or ``"wanted"`` is about.
    called : str
        What the user's function calls it; by default its name, behind ``return_`` where it says whether to return it.
    words : tuple of str
        What a ``"flag"`` is set by, where the user's function takes words and not a bool.
    """

    name: str
    role: str
    dtypes: tuple[DType, ...] = ()
    optional: bool = False
    like: str = ""
    of: tuple[str, ...] = ()
    called: str = ""
    words: tuple[str, ...] = ()

    @property
    def keyword(self) -> str:
        """What the user's function calls it."""
        returned = self.role in ("row_values", "column_values", "head_sums", "mask_sums")
        return self.called or (f"return_{self.name}" if returned else self.name)


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
        Whether the columns' arrays are [heads, columns].
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
    whole_heads : bool
        Whether the groups must be so many that each gets rows of the same heads again and again, as it keeps what
        belongs to them.
    group_unit : int
        Groups that take rows in turn are a multiple of it, if there are more: then all rows of a group lie alike, as
        far as their alignment goes.
    early : bool
        Whether it may begin before the launch before it on its stream, whatever that is, has ended: its kernel waits
        for that by itself, where it is compiled for an architecture that can (programmatic dependent launch).
    columns_per_cta : int
        Of a launch that follows the first, whose grid has enough CTAs for the columns in x, and the heads in y where
        there are arrays of each head; 0 for the first. `OF_HEADS`: a CTA for each head of rows [..., heads, queries,
        columns].
    spread_ctas : int
        Of such a launch: how many CTAs it has where no more of them shall share a multiprocessor than must. Else those
        that begin early all go where CTAs of the first launch have left first. So they ask for shared memory that they
        do not use: `dynamic_shared_memory`, half of a multiprocessor's, or less where several must share one. 0
        elsewhere.
    row_groups : int
        Of a launch over the columns that makes sums of the shape of a mask: how many groups of threads a CTA has, or a
        cluster of `ctas_per_row` in y. As many of them share the rows that a row of the mask was broadcast to as these
        are worth, a power of two, and y has CTAs for all rows of the mask, or as many CTAs as it may have; 0 elsewhere.
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
    spread_ctas: int = 0
    whole_heads: bool = False
    group_unit: int = 1
    early: bool = False
    row_groups: int = 0

    @property
    def cooperative(self) -> bool:
        """Whether all CTAs are resident together."""
        return self.ctas_per_row > 1 and not self.clusters


OF_HEADS = -1


class StaticKernel(NamedTuple):
    """An entry of a family's static module."""

    symbol: str
    params: Params


class Family(Protocol):
    """What a family of operators provides: pure functions of a request and a device's limits.

    A call may take several launches, one after the other: the first is over the rows, and others over the columns or
    the heads.
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
