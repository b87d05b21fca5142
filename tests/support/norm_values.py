# SPDX-License-Identifier: Apache-2.0
"""What norms make of values that are no ordinary numbers, and of outputs of 8 bits: in the simulator and on a GPU."""

from __future__ import annotations

import itertools

import calls
import norm_checks as checks
import numpy as np
import reference
from cases import BY_ROW, DELAYED, FLOAT8, FLOATS, FORWARD, NORMS, Case
from frameworks import BITS, bits
from norm_checks import case_of
from reference import NUMPY_TYPES, random_rows, random_weight
from rigs import Rig, run

from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT32, INT8, DType

# ---- Infinities, NaN and zeros -------------------------------------------------------------------------------------


def infinity_nan_and_zeros_stay_in_their_rows(
    rig: Rig, hidden: int, operator: str, dtype: DType, rng: np.random.Generator
) -> None:
    bias = dtype if operator == "layer_norm" else None
    case = case_of(operator, 8, hidden, dtype, rstd=operator in FORWARD, bias=bias, dweight=None, dbias=None)
    given = calls.make_inputs(rng, case)
    x = given["x"]
    # The last element too: where a row ends, loads differ.
    x[1, rng.integers(case.hidden)], x[2, -1] = np.inf, -np.inf
    x[3, rng.integers(case.hidden)], x[4, -1] = np.nan, np.nan
    x[5] = 0
    x[6] = -0.0
    expected = calls.expect(case, given)
    calls.hold_within(case, run(rig, case, given), expected)


def a_nan_in_the_weight_reaches_its_column_and_no_other(rig: Rig, rng: np.random.Generator) -> None:
    case = Case(8, 1000, BFLOAT16, BFLOAT16, BFLOAT16, operator="layer_norm", bias=BFLOAT16)
    given = calls.make_inputs(rng, case)
    given["weight"][[0, 500, 999]] = np.nan
    given["bias"][[7, 998]] = np.nan
    y = run(rig, case, given)["out"]
    assert set(np.flatnonzero(np.isnan(y).any(axis=0))) == {0, 7, 500, 998, 999}
    reference.assert_within(y, calls.expect(case, given)["out"], BFLOAT16)


def zeros_without_eps_are_nan(rig: Rig, rng: np.random.Generator) -> None:
    y, rstd = rig("rms_norm", np.zeros((3, 100), np.float32), eps=0.0, return_rstd=True)
    assert np.isnan(y).all() and np.isposinf(rstd).all(), "zero times infinity"


def an_output_beyond_its_type_is_infinite(rig: Rig, rng: np.random.Generator) -> None:
    x, weight = np.ones((2, 40), np.float32), np.full(40, 1e6, np.float32)
    weight[1::2] *= -1
    y = rig("rms_norm", x, weight, out_dtype="float16")
    np.testing.assert_array_equal(y, np.sign(weight) * np.full((2, 40), np.inf))


def subnormals_are_numbers_as_inputs_weights_and_outputs(rig: Rig, dtype: DType, rng: np.random.Generator) -> None:
    smallest = np.arange(1, 258, dtype=BITS[dtype.bytes])
    x = np.stack([smallest, smallest, smallest]).view(NUMPY_TYPES[dtype])
    x[1], x[2] = -x[1], 1
    for eps, weight in itertools.product((1e-6, 1e-30), (None, x[0, ::-1].copy())):
        y = rig("rms_norm", x, weight, eps)
        reference.assert_close(y, reference.rms_norm(x, weight, eps)[0], dtype)


def tiny_and_huge_rows(rig: Rig, exponent: int, dtype: DType, rng: np.random.Generator) -> None:
    # Squares of up to 2^126 are no overflow; those below the smallest number vanish beside eps.
    x = (rng.standard_normal((6, 257)) * 2.0**exponent).astype(NUMPY_TYPES[dtype])
    for operator in ("rms_norm", "layer_norm"):
        y = rig(operator, x, eps=1e-6)
        reference.assert_within(y, reference.forward(operator == "layer_norm", x, out=dtype)["out"], dtype)
        if operator == "rms_norm":
            reference.assert_close(y, reference.rms_norm(x)[0], dtype)


def eps_and_the_weights_offset_are_the_callers(rig: Rig, dtype: DType, rng: np.random.Generator) -> None:
    x, weight = random_rows(rng, (9, 300), dtype), random_weight(rng, 300, dtype)
    for eps, offset in itertools.product((0.0, 1e-6, 1e-5, 0.1, 3), (0.0, 1.0, -0.5, 0.1)):
        y = rig("rms_norm", x, weight, eps, weight_offset=offset)
        expected = reference.forward(False, x, weight, None, eps, offset, out=dtype)["out"]
        reference.assert_within(y, expected, dtype, f"{eps}, {offset}")
        reference.assert_close(y, reference.rms_norm(x, weight, eps, offset)[0], dtype)
    # Without a weight there is nothing to add it to.
    np.testing.assert_array_equal(bits(rig("rms_norm", x, weight_offset=1.0)), bits(rig("rms_norm", x)))


# ---- Rows of large numbers, and of equal ones ----------------------------------------------------------------------


def a_large_mean_costs_no_accuracy(rig: Rig, hidden: int, dtype: DType, eps: float, rng: np.random.Generator) -> None:
    noise = rng.standard_normal((5, hidden)) * np.array([[1e-2], [1], [30], [0], [0]])
    x = (np.array([[1e4], [-1e4], [3e4], [1e4], [1 / 3]]) + noise).astype(NUMPY_TYPES[dtype])
    weight, bias = (random_weight(rng, hidden, dtype) for _ in range(2))
    dy = random_rows(rng, x.shape, dtype)
    found = reference.forward(True, x, weight, bias, eps, out=dtype)
    gradients = reference.backward(True, dy, x, weight, eps)
    equal = x.min(axis=-1) == x.max(axis=-1)
    assert equal[3:].all()
    y, mean, rstd = rig("layer_norm", x, weight, bias, eps, return_mean=True, return_rstd=True)
    reference.assert_within(mean, found["mean"], FLOAT32, "mean")
    reference.assert_within(rstd, found["rstd"], FLOAT32, "rstd")
    reference.assert_within(y, found["out"], dtype)
    results = rig("layer_norm_backward", dy, x, weight, eps)
    for name, array in zip(("out", "dweight", "dbias"), results, strict=True):
        reference.assert_within(array, gradients[name], dtype, name)
    # Not by a bound that a large rstd blows up.
    of_equal = np.broadcast_to(bias, x.shape)[equal].astype(float)
    np.testing.assert_allclose(y[equal].astype(float), of_equal, 0.01, 0.01)


def rows_of_equal_elements_have_no_variance_whatever_their_size(
    rig: Rig, hidden: int, dtype: DType, eps: float, rng: np.random.Generator
) -> None:
    sizes = 10.0 ** rng.uniform(-10, 18, (100, 1)) * rng.choice([-1, 1], (100, 1))
    x = np.broadcast_to(sizes, (100, hidden)).astype(NUMPY_TYPES[dtype])
    bias = random_weight(rng, hidden, dtype)
    y, mean, rstd = rig("layer_norm", x, None, bias, eps, return_mean=True, return_rstd=True)
    np.testing.assert_array_equal(mean, x[:, 0].astype(np.float32))
    np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
    np.testing.assert_allclose(rstd, eps**-0.5, 1e-6)


def squares_that_are_too_large_about_the_first_elements_are_not_so_about_the_mean(
    rig: Rig, hidden: int, dtype: DType, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((2, hidden)) * 1e14
    x[:, :8] += 3e17 * np.sqrt(65536 / hidden)
    x = x.astype(NUMPY_TYPES[dtype])
    # The variance is a float; the sum of squares about the first Vec's mean is not.
    wide = x.astype(float)
    assert hidden * wide.var(axis=1).max() < 3e38 < 4e38 < ((wide - wide[:, :1]) ** 2).sum(axis=1).min()
    expected = reference.forward(True, x, out=dtype)
    y, rstd = rig("layer_norm", x, eps=1e-6, return_rstd=True)
    reference.assert_within(y, expected["out"], dtype)
    reference.assert_within(rstd, expected["rstd"], FLOAT32, "rstd")


def numbers_of_about_1e18_and_less_are_right_at_every_length(
    rig: Rig, operator: str, hidden_and_size: tuple[int, float], rng: np.random.Generator
) -> None:
    # The squares of large ones add up to more than a float holds, those of small ones are nearly subnormal: without
    # eps, beside which they would vanish.
    hidden, size = hidden_and_size
    case = case_of(operator, 2 if hidden > 1 << 16 else 4, hidden, FLOAT32, rstd=operator in FORWARD)
    given = calls.make_inputs(rng, case)
    x = size * rng.uniform(0.8, 1, case.shape) * rng.choice([-1, 1], case.shape)
    x[0].sort()  # each thread and CTA is far from the mean
    x[-1] += 8 * size * case.centred
    given["x"] = x = x.astype(np.float32)
    results = rig.on_host(rig.call(case, rig.on_device(given), eps=0.0))
    weight, bias = given["weight"], given.get("bias")
    if case.backward:
        expected = reference.backward(case.centred, given["dy"], x, weight, 0.0)
    else:
        expected = reference.forward(case.centred, x, weight, bias, 0.0)
    calls.hold_within(case, results, expected)


def rows_whose_squares_are_no_floats(rig: Rig, hidden: int, rng: np.random.Generator) -> None:
    # As the public functions say.
    x = rng.uniform(0.5, 1, (3, hidden)) * rng.choice([-1, 1], (3, hidden))
    dy, added, bias = (random_rows(rng, shape, FLOAT32) for shape in ((3, hidden), (3, hidden), (1, hidden)))
    for operator, more in (("rms_norm", ()), ("layer_norm", (bias[0],))):
        for size, eps, found in ((1e20, 1e-6, 0.0), (1e-25, 0.0, np.inf), (1e-25, 1e-46, np.inf)):
            large = (x * size).astype(np.float32)
            y, rstd = rig(operator, large, None, *more, eps=eps, return_rstd=True)
            np.testing.assert_array_equal(rstd, np.full(3, found))
            expected = np.sign(large) * np.inf if found else np.broadcast_to(more[0] if more else 0, x.shape)
            np.testing.assert_array_equal(y, expected)
            if found == 0:
                dx, dweight = rig(f"{operator}_backward", dy, large, eps=eps, dresidual=added, return_dweight=True)
                np.testing.assert_array_equal(dx, added)
                assert not dweight.any()
    assert np.isnan(rig("layer_norm", np.full((3, hidden), 1e38, np.float32), None, bias[0])).all()


# ---- Outputs of 8 bits ---------------------------------------------------------------------------------------------


def a_row_is_scaled_to_the_largest_number_and_a_row_of_zeros_by_one(
    rig: Rig, operator: str, hidden: int, dtype: DType, rng: np.random.Generator
) -> None:
    case = case_of(operator, 8, hidden, FLOAT32, out=dtype, scaling=BY_ROW, bias=None)
    given = calls.make_inputs(rng, case)
    given["x"][[1, 4]] = 0
    given["x"][4] = -0.0
    given["x"][6, hidden // 2], given["x"][7, -1] = np.nan, np.inf  # of no account for the others
    results = run(rig, case, given)
    calls.hold_within(case, results, calls.expect(case, given))
    largest = np.abs(results["out"][:6].astype(np.float64)).max(axis=-1)
    np.testing.assert_array_equal(largest, [reference.LARGEST[dtype] * (row not in (1, 4)) for row in range(6)])
    np.testing.assert_array_equal(results["row_scale"][[1, 4]], 1)
    assert np.isnan(results["row_scale"][6:]).all()


def a_scaled_row_of_the_smallest_numbers_is_what_its_scale_says(
    rig: Rig, operator: str, dtype: DType, rng: np.random.Generator
) -> None:
    # The largest number over the row's largest overflows, or the scale is no normal number.
    case = case_of(operator, 7, 1000, FLOAT32, out=dtype, scaling=BY_ROW)
    given = calls.make_inputs(rng, case)
    for magnitude in (2.0**-149, 1e-43, 1e-40, 2.0**-126, 1e-37, 1e-36, 1e-35, 1e-34, 1e-33):
        weight = (rng.choice([-1.0, -0.5, 0.25, 1.0], 1000) * magnitude).astype(np.float32)
        given["weight"], given["bias"] = weight, np.zeros_like(weight)
        results = rig.on_host(rig.call(case, rig.on_device(given)))
        plain = case._replace(out=FLOAT32, scaling=())
        y = rig.on_host(rig.call(plain, rig.on_device(given)))["out"].astype(np.float64)
        scale, out = (results[name].astype(np.float64) for name in ("row_scale", "out"))
        assert (scale >= 2.0**-126).all() and np.isfinite(out).all()
        # Half a unit of the type, in the largest of the row and of the smallest numbers; and y is rounded.
        unit = {FLOAT8_E4M3: 16, FLOAT8_E5M2: 4096, INT8: 0.50001}[dtype]
        wrong = np.abs(out * scale[:, None] - y)
        assert (wrong <= unit * scale[:, None] + 2.0**-149).all(), (magnitude, (wrong / scale[:, None]).max())


def amax_is_the_largest_magnitude_so_far_and_keeps_a_nan(rig: Rig, dtype: DType, rng: np.random.Generator) -> None:
    case = case_of("layer_norm", 37, 1000, BFLOAT16, out=dtype, scaling=DELAYED, bias=None)

    def amax_of(given: dict[str, np.ndarray], before: float = 0.0) -> np.ndarray:
        outputs = rig.on_device({name: np.full(1, before, np.float32) for name in ("amax", "scale_inv")})
        found = rig.on_host(rig.call(case, rig.on_device(given), outputs))
        np.testing.assert_array_equal(found["scale_inv"], np.float32(1) / given["scale"])
        return found["amax"]

    for before in (0.0, 1e9, np.nan):
        given = calls.make_inputs(rng, case)
        unscaled = {name: array for name, array in given.items() if name != "scale"}
        y = calls.expect(case._replace(scaling=()), unscaled)["out"]
        found = amax_of(given, before)
        reference.assert_within(found, reference.largest_magnitude(y, before), FLOAT32, "amax")
        # Where the largest one is, it is found.
        for row, column in ((0, 0), (36, 999), (17, 500)):
            given["weight"][:] = given["x"][:] = 0
            given["weight"][column], given["x"][row, column] = 1, -1
            np.testing.assert_allclose(amax_of(given), np.sqrt(1000), rtol=0.02)
        # One NaN among numbers, in whatever order they are compared.
        for place in (0, 1, 500, 999):
            given["weight"][:] = 1
            given["weight"][place] = np.nan
            assert np.isnan(amax_of(given)).all()


def what_a_type_of_8_bits_cannot_hold_becomes_its_largest_number(
    rig: Rig, dtype: DType, rng: np.random.Generator
) -> None:
    x = np.array([[1, -1, 1, -1]], np.float32)
    weight = np.array([1, 1e30, np.inf, np.nan], np.float32)
    if dtype is INT8:
        y, scale = rig("rms_norm", x, weight, 0.0, out_dtype="int8", row_scaling=True)
        # A row with a NaN has no scale, and int8 no NaN.
        assert np.isnan(scale).all() and not y.any()
        y, scale = rig("rms_norm", x, weight[:2].repeat(2), 0.0, out_dtype="int8", row_scaling=True)
        np.testing.assert_array_equal(y, [[0, 0, 127, -127]])
        return
    most = reference.LARGEST[dtype]
    scale = np.full(1, 2.0**20, np.float32)
    y = rig("rms_norm", x, weight, 0.0, out_dtype=dtype.name, scale=scale).astype(float)
    np.testing.assert_array_equal(y, [[most, -most, most, np.nan]])
    y = rig("rms_norm", x, weight, 0.0, out_dtype=dtype.name).astype(float)
    np.testing.assert_array_equal(y, [[1, -most, most, np.nan]])


def every_number_of_8_bits_is_reached_and_ties_go_to_even(
    rig: Rig, operator: str, dtype: DType, rng: np.random.Generator
) -> None:
    # Every number of the type, those halfway between two, those around, those that are too large, and any others.
    kind, most = NUMPY_TYPES[dtype], np.float32(reference.LARGEST[dtype])
    numbers = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(halfway, np.float32(way * np.inf)) for way in (-1, 1)]
    ends = most * np.float32([1.03, 1.04, 2, -1.5, 20, -20, 1e-10])
    others = np.exp2(rng.uniform(-18, np.log2(most) + 1, 3000)) * rng.choice([-1, 1], 3000)
    weight = np.concatenate([numbers, halfway, *near, ends, others]).astype(np.float32)
    weight = np.append(weight, weight[: weight.size % 2])
    # Rows whose norm, without eps, is they themselves: y is the weight, to the bit.
    x = np.ones((3, weight.size), np.float32)
    x[:, ::2] = x[1, 1::2] = -1
    x[1, ::2] = 1
    y = x * weight
    given = (x / 2, x / 2) if operator.startswith("add") else (x,)

    def converted(values: np.ndarray) -> np.ndarray:
        return (np.rint(values) if dtype is INT8 else values).clip(-most, most).astype(kind).astype(float)

    def found(**options: object) -> tuple[np.ndarray, ...]:
        results = rig(operator, *given, weight, eps=0.0, out_dtype=dtype.name, **options)
        return results if isinstance(results, tuple) else (results,)

    for scale in (None, 0.37, 13.0) if dtype is not INT8 else ():
        options = {} if scale is None else {"scale": np.full(1, scale, np.float32)}
        expected = converted(y if scale is None else y * np.float32(scale))
        np.testing.assert_array_equal(found(**options)[0].astype(float), expected, f"{scale}")
    # A row's own scale.
    largest = np.abs(y).max(axis=-1)
    out, *_, row_scale = found(row_scaling=True)
    np.testing.assert_array_equal(row_scale, largest / most)
    np.testing.assert_array_equal(out.astype(float), converted(y * (most / largest)[:, None]))


# ---- All of them -----------------------------------------------------------------------------------------------------

_NORMS, _BITS8 = ("layer_norm", "rms_norm"), (INT8, *FLOAT8)
_EITHER_WAY = ("rms_norm", "layer_norm_backward", "layer_norm", "rms_norm_backward")
_SOME = ("layer_norm_backward", "add_rms_norm", "rms_norm_add", *_NORMS, "rms_norm_backward", "add_layer_norm")
_HIDDEN = (129, 256, 1021, 4096, 1, 2, 3, 7, 8, 31, 64, 1000, 4097, 16384, 16385, 50257, 65536, 131071)
# Each check of the family, how many of its calls are not thorough in the simulator, the share of the others that runs
# there, and what its arguments may be: the simulator leaves out what is long.
CHECKS = (
    (checks.every_alignment_gives_the_same_bits_and_writes_nothing_else, 3, 0.15, _HIDDEN, _SOME),
    (checks.a_misaligned_output_of_another_type, 3, 0.2, (127, 4096, 2, 50257), FLOATS, (*_BITS8, *FLOATS)),
    (
        checks.in_place_gives_the_same_bits, 4, 0.1, (2000, 7, 4097, 4096, 1, 128, 1000, 16385, 65536, 262144, 262145),
        _SOME, FLOATS,
    ),
    (
        checks.heads_inside_a_packed_qkv, 4, 0.1, _EITHER_WAY, ("each", "all"), (64, 80, 96, 127, 128, 129, 256),
        (3, 1, 8, 32),
    ),
    (checks.two_strides_in_any_order_backwards_and_without_end, 2, 1, _NORMS),
    (checks.outputs_of_any_strides_change_nothing_around_them, 1, 1),
    (
        checks.a_rows_bits_are_the_same_alone_and_among_many, 3, 0.07, (1000, 64, 1, 129, 5, 4097, 33_001, 65536),
        _SOME, FLOATS,
    ),
    (checks.a_margin_gives_the_same_bits, 3, 0.3, (4097, 300, 64, 4096, 65536), NORMS),
    (checks.no_rows_give_empty_outputs_and_sums_of_zero, 2, 0.5, NORMS, [(0,), (3, 0, 2), (0, 3)]),
    (
        infinity_nan_and_zeros_stay_in_their_rows, 3, 0.15, (16385, 1000, 1, 3, 64, 129, 4096, 131071), _EITHER_WAY,
        FLOATS,
    ),
    (a_nan_in_the_weight_reaches_its_column_and_no_other, 1, 1),
    (zeros_without_eps_are_nan, 1, 1),
    (an_output_beyond_its_type_is_infinite, 1, 1),
    (subnormals_are_numbers_as_inputs_weights_and_outputs, 1, 1, FLOATS),
    (tiny_and_huge_rows, 2, 0.7, (-130, -60, -20, 40, 55), (FLOAT32, BFLOAT16)),
    (eps_and_the_weights_offset_are_the_callers, 2, 1, FLOATS),
    (a_large_mean_costs_no_accuracy, 2, 0.25, (3, 2000, 1000, 4097, 65536), FLOATS, (1e-5, 1e-12)),
    # 4 % of 12289 floats had a mean that rounding had moved; 4096 are in one pass about one that is not theirs.
    (
        rows_of_equal_elements_have_no_variance_whatever_their_size, 2, 0.3, (3, 2000, 4096, 12289),
        (FLOAT32, BFLOAT16), (1e-5, 1e-30),
    ),
    (
        squares_that_are_too_large_about_the_first_elements_are_not_so_about_the_mean, 2, 0.3,
        (1024, 4096, 4097, 33_000, 65536), (BFLOAT16, FLOAT32),
    ),
    (
        numbers_of_about_1e18_and_less_are_right_at_every_length, 4, 0.3, _EITHER_WAY,
        ((4096, 3e17), (4097, 1e-18), (16384, 9e17), (1000, 9e17), (1 << 20, 9e17), (1 << 20, 1e-18), (65536, 9e17),
         (200_000, 9e17), (3, 9e17), (4096, 1e-18)),
    ),
    (rows_whose_squares_are_no_floats, 1, 1, (1000, 16384, 65536)),
    (
        a_row_is_scaled_to_the_largest_number_and_a_row_of_zeros_by_one, 3, 0.2, _NORMS,
        (5, 33_000, 1000, 4097, 64, 4096, 65536), _BITS8,
    ),
    (a_scaled_row_of_the_smallest_numbers_is_what_its_scale_says, 2, 0.5, _NORMS, _BITS8),
    (amax_is_the_largest_magnitude_so_far_and_keeps_a_nan, 2, 1, FLOAT8),
    (what_a_type_of_8_bits_cannot_hold_becomes_its_largest_number, 3, 1, _BITS8),
    (every_number_of_8_bits_is_reached_and_ties_go_to_even, 2, 0.4, (*_NORMS, "add_rms_norm"), _BITS8),
)  # fmt: skip
