# SPDX-License-Identifier: Apache-2.0
"""What softmax makes of infinities, NaN, far scores and nothing, for the simulator and for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import softmax_reference as expected
from reference import NUMPY_TYPES, assert_within
from rigs import Rig
from softmax_checks import NAMES, call, hold, hold_drawn

from transformer_rtc.spec import FLOAT32, DType


def hold_infinities(on: Rig, rng: np.random.Generator, columns: int, dtype: DType, masked: bool) -> None:
    """Hold rows of infinities and NaN, whatever the scale; -infinity takes no part, nor does what is masked."""
    x = expected.drawn(rng, (8, columns), dtype)
    nothing = np.full(1, -np.inf, x.dtype)  # a sink that adds nothing
    x[0] = -np.inf
    x[1, : columns // 2], x[2, 2::3] = -np.inf, -np.inf
    x[3, 3], x[4, 5] = np.inf, np.nan
    x[5, 1], x[5, 2] = np.inf, -np.inf
    x[6, 1], x[6, 2], x[6, 6] = -np.inf, np.nan, -np.inf
    x[7, 3], x[7, 4] = np.nan, np.inf
    mask = (rng.random(x.shape) < 0.4) & masked
    mask[:, 2:6] = False
    given = {"mask": mask} if masked else {}
    for scale in (1.0, 0.0, -0.7):
        found = expected.forward(x, scale, ~mask, dtype)
        y, lse = call(on, "softmax", x, scale=scale, return_lse=True, **given)
        log_y = call(on, "log_softmax", x[None], scale=scale, return_lse=True, sink=nothing, **given)[0][0]
        assert (y[mask] == 0).all() and (log_y[mask] == -np.inf).all()
        # Beside what is excluded, -infinity in a row of NaN takes no part either; elsewhere it is as torch has it.
        rows = [row for row in range(8) if not masked or row < 5]
        for result, of in ((y, "y"), (log_y, "log_y"), (lse, "lse")):
            assert_within(result[rows], found[of][rows], FLOAT32 if of == "lse" else dtype, of)
        if masked:
            out = mask[6] | (x[6] == -np.inf)
            for result, absent in ((y[6], 0), (log_y[6], -np.inf)):
                np.testing.assert_array_equal(np.isnan(result.astype(float)), ~out)
                assert (result[out] == absent).all()
        assert not call(on, "softmax_backward", x, np.zeros_like(x)).astype(float).any()


def hold_what_took_no_part(on: Rig, rng: np.random.Generator, columns: int, types: Sequence[DType]) -> None:
    """Hold dx to 0 just where y is 0 of either sign, or -infinity, beside the y next to that and sums of no number.

    `types`: of y, dy and dx.
    """
    of_y, of_dy, out = types
    limits = ml_dtypes.finfo(NUMPY_TYPES[of_y])
    for name, logarithm in zip(NAMES, (False, True), strict=True):
        absent = rng.random((4, columns)) < 0.4
        absent[1:3, :2] = False
        y = rng.uniform(0.1, 1, absent.shape)
        y = (np.log(y) if logarithm else y).astype(NUMPY_TYPES[of_y])
        y[absent] = -np.inf if logarithm else np.where(rng.random(absent.sum()) < 0.5, 0.0, -0.0)
        dy = expected.drawn(rng, y.shape, of_dy)
        dy[absent] = np.where(rng.random(absent.sum()) < 0.5, np.nan, np.inf)
        y[1, 0], dy[1, 0] = limits.min if logarithm else limits.smallest_subnormal, np.nan
        y[2, :2] = np.inf, np.nan
        dx = call(on, f"{name}_backward", dy, y, out_dtype=out.name)
        found = dx[absent].astype(np.float32)
        assert (found == 0).all() and not np.signbit(found).any()
        numbers = np.isfinite(dx.astype(np.float32))
        assert numbers[[0, 3]].all() and not numbers[1][~absent[1]].any() and not numbers[2, :2].any()
        # Of its logarithm, a row's sum is that of dy.
        assert numbers[2][~absent[2]].sum() == ((~absent[2]).sum() - 2 if logarithm else 0)


def hold_an_element_alone(on: Rig, rng: np.random.Generator, columns: int, dtype: DType) -> None:
    """Hold an element alone to one, and its logarithm to zero, exactly."""
    rows = 4 if columns > 10_000 else 40
    for scale in (0.7, 30.0, 1000.0):
        x = np.full((rows, columns), -np.inf, NUMPY_TYPES[dtype])
        places = np.arange(rows), rng.integers(0, columns, rows)
        x[places] = expected.drawn(rng, (rows,), dtype)
        for name, wanted in zip(NAMES, (1, 0), strict=True):
            y = call(on, name, x, scale=scale, return_lse=True)[0]
            np.testing.assert_array_equal(y[places].astype(float), wanted)


def hold_small_numbers(on: Rig, rng: np.random.Generator, columns: int, size: float) -> None:
    """Hold small numbers beside parts of nothing.

    exp(88.8) is infinite: a CTA of which nothing takes part must not be weighed against the others.
    """
    x = np.full((1, 1, 1, columns), -np.inf, np.float32)
    x[..., :5] = size + rng.standard_normal(5)
    for sink in (None, np.array([-150.0], np.float32)):
        found = expected.forward(x, sink=sink)
        y, lse = call(on, "softmax", x, return_lse=True, sink=sink)
        assert_within(y, found["y"], FLOAT32)
        assert_within(lse, found["lse"], FLOAT32, "lse")
        assert_within(call(on, "log_softmax", x, sink=sink), found["log_y"], FLOAT32, "log_y")


def hold_a_slope(on: Rig, rng: np.random.Generator, slope: float, columns: int, reverse: int) -> None:
    """Hold rows that grow or fall: what terms are about moves with each Vec, chunk or CTA, a little or by much."""
    x = (slope * np.arange(columns) + rng.standard_normal(columns) * slope).astype(np.float32)[None, ::reverse]
    x = np.ascontiguousarray(np.concatenate([x, x]))
    x[1, rng.integers(0, columns)] = x[1].max() + 3  # dominates its row
    hold(on, x, expected.drawn(rng, x.shape, FLOAT32), FLOAT32)


def hold_far_scores(on: Rig, rng: np.random.Generator, columns: int, dtype: DType) -> None:
    """Hold scores far from zero: what rounding leaves of the largest one times the scale must not be in y."""
    for far, scale in ((1000, 0.01), (-1000, 1.0), (30_000, 1e4), (-6e4, 1e30), (0, 1e-30), (1e-3, 1e37)):
        x, dy = (expected.drawn(rng, (3, columns), dtype) for _ in range(2))
        x = (x.astype(np.float32) + np.float32(far)).astype(x.dtype)
        x[1, ::7] = x[1].max()  # equal ones have equal y
        x[2] = far
        hold(on, x, dy, dtype, scale)


def hold_far_masks(on: Rig, rng: np.random.Generator, columns: int, dtype: DType, added: DType) -> None:
    """Hold a mask as of a query that takes no part, with scores so far apart that they are seen beside it."""
    for far in (-1e9, -3e7, 1e8):
        mask = np.full((3, columns), far, NUMPY_TYPES[added])
        hold_drawn(on, rng, (3, columns), dtype, mask=mask, spread=40)


def hold_whatever_is_added(on: Rig, rng: np.random.Generator) -> None:
    """Hold -infinity to no part whatever is added, and to the same what a mask excludes, whatever that is."""
    x, other, excludes = (np.zeros((1, 10), np.float32) for _ in range(3))
    x[:, 2:8], other[:, 7:], excludes[:, 7:] = (-np.inf, 3, -np.inf, 0, 0, 1), (np.nan, np.inf, -np.inf), -np.inf
    mask = np.where(x == -np.inf, np.float32([[0, 0, np.inf, 0, np.nan, 0, 0, 0, 0, 0]]), np.float32(0))
    wanted = np.exp(x - 3) / np.exp(x - 3).sum()
    np.testing.assert_allclose(call(on, "softmax", x, mask=mask), wanted, 1e-6)
    np.testing.assert_allclose(call(on, "softmax", other, mask=excludes), [[1 / 7] * 7 + [0] * 3], 1e-6)
    # A row of NaN: as torch has it where nothing is excluded; zero beside what is.
    x = np.array([[np.nan, -np.inf, 0, 1]], np.float32)
    for name, absent in zip(NAMES, (0, -np.inf), strict=True):
        assert np.isnan(call(on, name, x)).all()
        for mask in (np.zeros(4, bool), np.zeros(4, np.float32)):
            np.testing.assert_array_equal(call(on, name, x, mask=mask), [[np.nan, absent, np.nan, np.nan]])
    # Below it, a sink is all that there is.
    x = np.full((1, 2, 1, 8), -np.inf, np.float32)
    y, lse = call(on, "softmax", x, sink=np.array([-200, 90], np.float32), return_lse=True)
    assert (y == 0).all() and (lse == [[[-200], [90]]]).all()
