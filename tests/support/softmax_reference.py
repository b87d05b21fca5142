# SPDX-License-Identifier: Apache-2.0
"""Softmax in float64, and what float32 arithmetic may differ from it by.

v = scale * x + mask is rounded to float32 by definition, but for a result of 16 bits without a mask of floats, where
the scale is applied to differences. With u = 2^-24 and d = max(v) - v of an element: v - max(v) is within d u, the
exponential of that within 1.2 u more. For a result of 16 bits an exponential of base 2 is taken of a number about 24,
which is rounded by 2^-20 (and more as d grows), as is that of max(v): within 2^-19 + 2^-21 d, with 2^-22 of each
instruction. The sum is within what its terms are, 2.4 u of an exponential that takes those of a part of the row to
what is about the row's largest v, and `LONGEST` additions; the quotient within 2 u. Where a long row's largest v is
learnt on the way, a term of the sum may be about a v that is 2 less, from which it comes to the largest in steps of 2
and more (the differences to 2 above and back are within 4 u, an exponential and a product 2.2 u): within 4 u and
1.1 d u more. `LONGEST`, which only equal terms would need, has room for that.
"""

from __future__ import annotations

import numpy as np
from reference import LONGEST, NUMPY_TYPES, Expected, U

from transformer_rtc.spec import FLOAT32, DType

SMALLEST = 2.0**-149


def taking_part(shape, mask=None, keeps=False, causal=None, window=None) -> np.ndarray:
    """Return which elements take part, of [..., queries, keys]."""
    found = np.ones(shape, bool)
    if mask is not None:
        found &= np.broadcast_to(np.asarray(mask, bool) == keeps, shape)
    if causal:
        queries, keys = shape[-2:]
        last = np.arange(queries)[:, None] + (keys - queries)
        column = np.arange(keys)[None, :]
        found &= column <= last
        if window is not None:
            found &= column > last - window
    return found


def _parts(x, scale, within, added, sink, out):
    with np.errstate(all="ignore"):
        v = x.astype(np.float64) * float(np.float32(scale)) + (0 if added is None else added.astype(np.float64))
        if out is FLOAT32 or added is not None:
            v = v.astype(np.float32).astype(np.float64)
        v = np.where(within & (x.astype(np.float32) != -np.inf), v, -np.inf)
        most = v.max(axis=-1, keepdims=True)
        more = np.full(1, -np.inf) if sink is None else sink.astype(np.float64)[:, None, None]
        most = np.fmax(most, more)
        base = np.where(most == -np.inf, 0, most)
        below = v - base
        p = np.exp(below)
        total = p.sum(axis=-1, keepdims=True) + np.exp(more - base)
        # Of a term and of the sum, relatively: far terms are inexact, and small.
        distance = np.where(np.isfinite(below), -below, 0)
    return v, most, distance, p, total


def _errors(distance, p, total, out: DType):
    of_term = (1.2 + distance) * U if out is FLOAT32 else 2.0**-19 + distance * 2.0**-21
    with np.errstate(all="ignore"):
        of_sum = (p * of_term).sum(axis=-1, keepdims=True) / np.where(total > 0, total, 1) + (2.4 + LONGEST) * U
    return of_term, np.where(np.isfinite(of_sum), of_sum, 0)


def forward(x, scale=1.0, within=None, out: DType = FLOAT32, added=None, sink=None) -> dict[str, Expected]:
    """Return y, its logarithm, and lse."""
    within = np.ones(x.shape, bool) if within is None else within
    v, most, distance, p, total = _parts(x, scale, within, added, sink, out)
    of_term, of_sum = _errors(distance, p, total, out)
    with np.errstate(all="ignore"):
        y = np.where(total == 0, 0, p / total)
        log_total = np.where(total == 0, 0, np.log(total))
        base = np.where(most == -np.inf, 0, most)
        log_y = np.where(v == -np.inf, -np.inf, v - base - log_total)
        lse = np.where(total == 0, -np.inf, base + log_total)[..., 0]
        # Not -inf inputs of rows that are NaN: those are as in any softmax.
        nan = np.isnan(total)
        y = np.where(within, np.where(nan, np.nan, y), 0)
        log_y = np.where(within, np.where(nan, np.nan, log_y), -np.inf)
        log_error = of_sum + 2.0**-22 + (np.abs(log_total) + distance) * 2 * U
        bounds = (
            y * (of_term + of_sum + 2 * U) + SMALLEST,
            np.where(np.isfinite(log_y), log_error + np.abs(log_y) * U, 0),
            np.where(np.isfinite(lse), (log_error[..., :1] + np.abs(base) * 2 * U)[..., 0] + np.abs(lse) * U, 0),
        )
    found = [Expected(value, np.nan_to_num(bound)) for value, bound in zip((y, log_y, lse), bounds, strict=True)]
    return dict(zip(("y", "log_y", "lse"), found, strict=True))


def backward(dy, y, scale=1.0, within=None, logarithm=False, out: DType = FLOAT32) -> Expected:
    """Return dx of a given y."""
    within = np.ones(y.shape, bool) if within is None else within
    dy, y = dy.astype(np.float64), y.astype(np.float64)
    within = within & (y != (-np.inf if logarithm else 0))
    scale = float(np.float32(scale))
    with np.errstate(all="ignore"):
        p = np.exp(y) if logarithm else y
        terms = np.where(within, dy if logarithm else dy * y, 0)
        total = terms.sum(axis=-1, keepdims=True)
        of_total = LONGEST * U * np.abs(terms).sum(axis=-1, keepdims=True)
        dx = scale * (dy - p * total if logarithm else y * (dy - total))
        of_p = ((2 + np.abs(y)) * U if out is FLOAT32 else (1 + np.abs(y)) * 2.0**-21) if logarithm else 2 * U
        bound = np.abs(scale * p) * (of_total + of_p * np.abs(total)) + 2 * U * np.abs(
            scale * dy * (1 if logarithm else y)
        )
        value = np.where(within, dx, 0)
        # A product of a subnormal y is within 2^-150 before it is scaled.
        bound = np.where(within & np.isfinite(bound), bound + np.abs(dx) * 3 * U + (1 + abs(scale)) * SMALLEST, 0)
    return Expected(value, np.nan_to_num(bound))


def sink_gradient(dy, y, sink, lse, within=None, logarithm=False) -> Expected:
    """Return dsink [heads] of [..., heads, queries, keys], from lse as it was returned."""
    within = np.ones(y.shape, bool) if within is None else within
    dy, y, sink, lse = (array.astype(np.float64) for array in (dy, y, sink, lse))
    within = within & (y != (-np.inf if logarithm else 0))
    with np.errstate(all="ignore"):
        terms = np.where(within, dy if logarithm else dy * y, 0)
        distance = np.where(sink == -np.inf, 0, lse.swapaxes(-1, -2) - sink).swapaxes(-1, -2)
        p = np.where(sink[:, None] == -np.inf, 0, np.exp(-distance))
        of_row = -p * terms.sum(axis=-1)
        bound = p * np.abs(terms).sum(axis=-1) * (LONGEST + 2 + np.abs(distance)) * U
    axes = tuple(i for i in range(of_row.ndim) if i != of_row.ndim - 2)
    # And the rows are added up: a thread's, then the threads'.
    rows = (LONGEST + of_row.size / max(1, len(sink)) / 256) * U * np.abs(of_row)
    return Expected(of_row.sum(axis=axes), (bound + rows).sum(axis=axes) + SMALLEST)


def mask_gradient(dy, y, shape, within=None, logarithm=False) -> Expected:
    """Return the gradient of a mask of floats of a shape that is broadcast to that of y.

    An element is the sum of what its `rows` add, each of which errs as dx does. A term goes through at most 32
    additions in its block of rows, as many as its group has blocks, 5 from group to group, and 7 from CTA to CTA; each
    errs by u of the sum of magnitudes. Where a group has more than one block, there are 32 of them at least.
    """
    of_rows = backward(dy, y, 1.0, within, logarithm)
    padded = (1,) * (y.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i in range(y.ndim) if padded[i] == 1 and y.shape[i] != 1)
    rows = y.size / max(1, np.prod(shape))
    bound = of_rows.bound + (LONGEST + rows / 1024 + 1 + 5 + 7) * U * np.abs(of_rows.value)
    return Expected(
        of_rows.value.sum(axis=axes, keepdims=True).reshape(shape), bound.sum(axis=axes, keepdims=True).reshape(shape)
    )


def drawn(rng: np.random.Generator, shape, dtype: DType, spread=3.0) -> np.ndarray:
    """Return random logits."""
    return (rng.standard_normal(shape) * spread).astype(NUMPY_TYPES[dtype])
