# SPDX-License-Identifier: Apache-2.0
"""The arrays of bandwidth.py's cases, what is expected of them in float64, and the check of a provider's results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import softmax_cases
from bandwidth_cases import BYTES, DRESIDUAL, PACKED, PACKED_HEADS, Case

DEVICE = "cuda"
EPS = 1e-6
CHECKED_ROWS = 32
# Of the norm of the error to the norm of the result; a peer may round x * rstd before it multiplies by the weight, and
# float32 sums over rows depend on their order.
TOLERANCES = {"bfloat16": (5e-3, 5e-3), "float32": (1e-5, 1e-4)}
EIGHT_BITS_TOLERANCE = 4e-2


class Arrays(NamedTuple):
    """Of a call; those that its operator does not have are None."""

    x: Any
    other: Any  # the residual, or dy
    weight: Any
    bias: Any
    mean: Any
    rstd: Any
    softmax: Any  # what there is of it
    read: tuple[Any, ...]  # arrays of rows without gaps: what a copy of as many bytes reads
    dresidual: Any = None

    @property
    def columns(self) -> tuple[Any, ...]:
        return tuple(one for one in (self.weight, self.bias) if one is not None)


def make_arrays(torch: Any, case: Case) -> Arrays:
    def normal(*shape: int) -> Any:
        return torch.empty(shape, dtype=getattr(torch, case.dtype), device=DEVICE).normal_()

    centred = case.does.norm == "layer_norm"
    if case.does.norm == "softmax":
        given = softmax_cases.make(torch, case, normal, DEVICE)
        read = (given.x,) if given.dy is None else (given.x, given.dy)
        return Arrays(given.x, given.dy, None, None, None, None, given, read)
    if case.part:
        first, heads = PACKED[case.part]
        x = normal(case.rows, PACKED_HEADS, case.hidden)[:, first : first + heads]
    else:
        x = normal(case.rows, case.hidden)
    other = normal(*x.shape) if case.does.reads == 2 else None
    weight = normal(*((case.heads,) if case.per_head else ()), case.hidden)
    bias = normal(case.hidden) if centred else None
    mean = rstd = None
    if case.backward:
        values = x.float()
        if centred:
            mean = values.mean(-1)
            values = values - mean.unsqueeze(-1)
        rstd = torch.rsqrt(values.square().mean(-1) + EPS)
    contiguous = x.contiguous()
    dresidual = normal(*x.shape) if case.form == DRESIDUAL else None
    read = tuple(one for one in (contiguous, other, dresidual) if one is not None)
    return Arrays(x, other, weight, bias, mean, rstd, None, read, dresidual)


class Expected(NamedTuple):
    """Results in float64: of outputs of rows, some rows only."""

    some: Any
    rows: list[Any]
    columns: list[Any]


def expected(torch: Any, case: Case, arrays: Arrays) -> Expected:
    if case.does.norm == "softmax":
        rows = math.prod(case.matrix) * case.rows
        some = torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS), device=DEVICE).long()
        return Expected(some, *softmax_cases.expected(torch, case, some, arrays.softmax, DEVICE))
    weight, bias = arrays.weight.double(), 0.0 if arrays.bias is None else arrays.bias.double()

    def normalized(x: Any) -> tuple[Any, Any]:
        x = x.double()
        if case.does.norm == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * rstd, rstd

    some = torch.linspace(0, case.rows - 1, min(case.rows, CHECKED_ROWS), device=DEVICE).long()
    x, other = arrays.x[some], None if arrays.other is None else arrays.other[some]
    if case.does.way == "add before":
        total = x + other
        return Expected(some, [normalized(total)[0] * weight + bias, total.double()], [])
    x_hat, rstd = normalized(x)
    if not case.backward:
        return Expected(some, [x_hat * weight + bias + (0.0 if other is None else other.double())], [])
    g = other.double() * weight
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if case.does.norm == "layer_norm":
        dx = dx - g.mean(-1, keepdim=True)
    dweight = torch.zeros_like(weight)
    dbias = torch.zeros_like(weight)
    step = max(1, 2**24 // (case.heads * case.hidden))
    for first in range(0, case.rows, step):
        dy = arrays.other[first : first + step].double()
        dweight += (dy * normalized(arrays.x[first : first + step])[0]).sum_to_size(weight.shape)
        dbias += dy.sum_to_size(weight.shape)
    dx = rstd * dx
    if arrays.dresidual is not None:
        dx = dx + arrays.dresidual[some].double()
    return Expected(some, [dx], [dweight] if arrays.bias is None else [dweight, dbias])


def check(torch: Any, call: Callable[[], Any], case: Case, arrays: Arrays, wanted: Expected) -> str | None:
    """Return what is wrong with a provider's results, or None."""
    of_out = torch.empty_like(arrays.read[0], dtype=getattr(torch, case.out))
    of_columns = arrays.weight if arrays.softmax is None else arrays.softmax.gradients_of
    like = [of_out] * len(wanted.rows) + [of_columns] * len(wanted.columns)
    # NaNs in the memory that the allocator hands out next for arrays of these sizes.
    poisoned = [torch.full_like(one, 100 if case.out == "int8" else math.nan) for one in like]
    del poisoned
    found = call()
    found = found if isinstance(found, (tuple, list)) else (found,)
    torch.cuda.synchronize()
    scale = 1.0
    if case.by_row:
        *found, row_scale = found
        scale = row_scale[wanted.some].double().unsqueeze(-1)
    if len(found) != len(like):
        return f"{len(found)} results instead of {len(like)}"
    of_rows, of_others = TOLERANCES[case.dtype]
    if BYTES[case.out] == 1:
        of_rows = EIGHT_BITS_TOLERANCE
    exact = [(one, of_rows) for one in wanted.rows] + [(one, of_others) for one in wanted.columns]
    for number, (result, one, (reference, tolerance)) in enumerate(zip(found, like, exact, strict=True)):
        if result.shape != one.shape or result.dtype != one.dtype:
            return f"result {number}: {tuple(result.shape)} {result.dtype} for {tuple(one.shape)} {one.dtype}"
        if not bool(torch.isfinite(result.float()).all()):
            return f"result {number} has elements that are not finite"
        some = result
        if number < len(wanted.rows):
            some = (result.reshape(-1, case.hidden) if case.matrix else result)[wanted.some]
        deviation = float((some.double() * scale - reference).norm() / reference.norm())
        if not deviation <= tolerance:
            return f"result {number} has a relative error of {deviation:.1e}"
    return None
