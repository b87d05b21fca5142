"""The arrays among the arguments of a call, found by the roles that an operator declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError
from ..spec import DType
from .streams import stream_handle

if TYPE_CHECKING:
    from ..request import Argument

_MADE = ("row_values", "column_values", "head_sums", "mask_sums")  # roles of arrays that the caller never gives
_GIVEN = (
    "rows",
    "columns",
    "row_inputs",
    "value",
    "mask",
    "head_values",
    "rows_out",
    "value_out",
)  # roles of arrays of the caller's
_WRITTEN = ("rows_out", "value_out")  # roles of arrays that are written where the caller gives them


class GivenArray(NamedTuple):
    """An array among a call's arguments."""

    name: str  # what messages call it
    array: Any  # None where it is left out
    written: bool  # where the caller gives it
    dtypes: tuple[DType, ...]


def arrays_of(
    operator: str, arguments: Sequence[Argument], values: tuple[Any, ...]
) -> tuple[list[GivenArray], int | None]:
    """Return the arrays of a call, one for each argument that is an array; and the handle of the stream it is given."""
    arrays: list[GivenArray] = []
    stream = None
    for argument, value in zip(arguments, values, strict=True):
        name, written = f"{operator}: {argument.keyword}", argument.role in _WRITTEN
        if argument.role == "stream":
            stream = None if value is None else stream_handle(value, operator)
        elif argument.role in _MADE:
            arrays.append(GivenArray(argument.name, None, written, ()))
        elif argument.role in _GIVEN:
            if value is None and not written and not argument.optional:
                raise ArgumentError(f"{name} must be an array; it is None")
            arrays.append(GivenArray(name, value, written, argument.dtypes))
    return arrays, stream
