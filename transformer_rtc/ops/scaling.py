# SPDX-License-Identifier: Apache-2.0
"""What operators with outputs of 8 bits have in common: the arguments of their scales, and what these need."""

from __future__ import annotations

from ..arguments import Input, Result, Update
from ..errors import ArgumentError
from ..request import Request
from ..spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8, DType

__all__ = ["EIGHT_BITS", "FLOAT8", "FLOATS", "QUANTIZED", "ROW_SCALE", "check_scales", "scales"]

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
FLOAT8 = (FLOAT8_E4M3, FLOAT8_E5M2)
EIGHT_BITS = (*FLOAT8, INT8)
QUANTIZED = (*FLOATS, *EIGHT_BITS)
_ONE = "() | 1"


def scales(of: str) -> tuple[Input, Update, Update]:
    """Return the arguments of one scale for all of an output, which has a type of `of`."""
    return (
        Input(
            "scale",
            _ONE,
            (FLOAT32,),
            optional=True,
            doc=f"For an output of {of}: y is multiplied by `scale` before y is rounded.",
        ),
        Update(
            "amax",
            _ONE,
            (FLOAT32,),
            over_rows="max",
            doc=f"""For an output of {of}: it becomes the maximum of its value and of the magnitudes of y before the
            scale, or NaN if y has a NaN. Its value before the call must not be negative, nor -0.0.""",
        ),
        Update(
            "scale_inv",
            _ONE,
            (FLOAT32,),
            doc="It becomes ``1 / scale``. Without rows it does not change. These three are TransformerEngine's.",
        ),
    )


ROW_SCALE = Result(
    "row_scale",
    "...",
    (FLOAT32,),
    called="row_scaling",
    doc="""For an output of float8 or int8: each row is divided by its own scale, and the scales are returned:
    ``y = out * row_scale``. A scale is the row's largest magnitude divided by the largest number of the type. It is at
    least 2^-126, and 1 for a row of zeros.""",
)


def check_scales(request: Request, scaled: tuple[DType, ...] = FLOAT8) -> None:
    """Refuse scales that an output does not have.

    Parameters
    ----------
    request : Request
        What an operator is asked for.
    scaled : tuple of DType
        The types of outputs that may have one scale. Those of 8 bits that are not among them need a scale of each row.

    Raises
    ------
    ArgumentError
        If it is so.
    """
    dtypes, out = request.dtypes, request.dtypes["out"]
    assert out is not None

    def refuse(what: str) -> None:
        raise ArgumentError(f"{request.operator}: {what}")

    if dtypes.get("row_scale") is not None:
        if out not in EIGHT_BITS:
            refuse(f"row_scaling needs an output of float8_e4m3fn, float8_e5m2 or int8; it is {out.name}")
        for name in ("scale", "amax", "scale_inv"):
            if dtypes[name] is not None:
                refuse(f"{name} and row_scaling exclude each other")
    elif out in EIGHT_BITS and out not in scaled:
        refuse(f"an output of {out.name} needs row_scaling=True; it is False")
    for name in ("scale", "amax", "scale_inv"):
        if dtypes.get(name) is not None and out not in scaled:
            *others, last = (dtype.name for dtype in scaled)
            refuse(f"{name} needs an output of {', '.join(others)} or {last}; it is {out.name}")
    if dtypes.get("scale_inv") is not None and dtypes["scale"] is None:
        refuse("scale_inv needs a scale, of which it is the inverse; scale is None")
