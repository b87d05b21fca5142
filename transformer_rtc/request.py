# SPDX-License-Identifier: Apache-2.0
"""What a call asks its operator's family for, and how kernels are launched. A leaf: no CUDA, no files."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from .spec import DeviceLimits, DType, KernelSpec, Params

__all__ = ["Asked", "Family", "LaunchRule", "Request", "StaticKernel"]


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
    unaligned : bool
        Whether rows may have any length and begin anywhere. Else every row of every array begins at an aligned address
        and is whole vectors, of as many elements as the launch rule says.
    """

    operator: str
    dtypes: dict[str, DType | None]
    columns: int
    per_head: bool
    margin: bool
    flags: frozenset[str] = frozenset()
    unaligned: bool = False


class Asked(NamedTuple):
    """A request, and the most CTAs that might share a row: what decides which kernels a device needs.

    Attributes
    ----------
    request : Request
        What an operator was asked for.
    max_ctas_per_row : int
        Fewer than usual where a part of a GPU has no room for so many at a time.
    config : dict of str to object, or None
        The values of the configuration that a tuning file chose; None: it has the default one.
    """

    request: Request
    max_ctas_per_row: int = DeviceLimits._field_defaults["max_ctas_per_row"]
    config: dict[str, Any] | None = None


class LaunchRule(NamedTuple):
    """How a kernel is launched, but for the number of rows.

    Attributes
    ----------
    threads : int
        Of a CTA.
    rows_per_cta, ctas_per_row : int
        So many CTAs have so many rows at a time.
    elements_per_cta : int
        Instead of whole rows, a CTA has so many elements, of vectors that follow each other in rows that follow each
        other, if this is not 0. A row's last vector counts as a whole one.
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
        Of each row, for what later launches read; not zeroed.
    persistent : bool
        Whether there are no more groups than are resident together, and each works on one row after another. Those
        of a cooperative launch always do.
    whole : str
        The dimension before the columns, if a group keeps what belongs to its elements: then there are so many groups
        that all rows of one group belong to the same elements.
    early : bool
        Whether it may begin before the launch before it on its stream, whatever that is, has ended: its kernel waits
        for that by itself, where it is compiled for an architecture that can (programmatic dependent launch).
    vec_size : int
        Of the first launch: the elements of a vector, if rows must be whole vectors at aligned addresses; 1: they need
        not.
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
    elements_per_cta: int = 0
    ctas_per_row: int = 1
    clusters: bool = False
    dynamic_shared_memory: int = 0
    workspace_bytes: int = 0
    partial_bytes: int = 0
    turn_bytes: int = 0
    row_bytes: int = 0
    persistent: bool = False
    vec_size: int = 1
    columns_per_cta: int = 0
    per: str = ""
    rows_of: str = ""
    spread_ctas: int = 0
    whole: str = ""
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
        """Refuse what data types, presence and flags alone show to be wrong.

        Raises
        ------
        ArgumentError
            If it asks for what the operator does not do.
        """
        ...

    def case(self, request: Request) -> tuple[object, ...]:
        """Return what a request's configuration depends on: requests of one case may have the same ones."""
        ...

    def configurations(self, request: Request, limits: DeviceLimits) -> tuple[Any, ...]:
        """Return the configurations, frozen dataclasses, that a request's first kernel may have.

        The default one is the first; the others follow in the order of what they are expected to cost.

        Raises
        ------
        ArgumentError
            If it asks for what the operator does not do.
        """
        ...

    def specialise(
        self, request: Request, limits: DeviceLimits, config: Any = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        """Return the kernels of a request, the first of them by one of its configurations, or by the default one.

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
