# SPDX-License-Identifier: Apache-2.0
"""Conversions between float32 and narrower formats, on every value that can round in its own way."""

from __future__ import annotations

from typing import Any, NamedTuple

import kernel_cache
import ml_dtypes
import numpy as np
import pytest
from norm_checks import first_of

from transformer_rtc import Field, Kernel, LaunchConfig, SimulatedDevice, compiler, sources
from transformer_rtc.spec import STATIC_ARCHITECTURES

MANAGER = kernel_cache.manager()
CHECKED = SimulatedDevice(checked=True)
THREADS, CTAS = 64, 16
CANONICAL_NAN = 0x7FFFFFFF


class Format(NamedTuple):
    """A format of 16 or 8 bits, and the helpers that convert to and from it."""

    dtype: np.dtype[Any]
    largest: int  # the bits of its largest number
    saturates: bool  # whether that is what larger ones become
    nan: int
    to: tuple[str, ...]  # of (low, high), two values in one word
    back: tuple[str, ...]  # of one value's bits

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def values(self, bits: np.ndarray) -> np.ndarray:
        """Return what bits mean, in float32."""
        with np.errstate(all="ignore"):
            return bits.astype(f"uint{self.bits}").view(self.dtype).astype(np.float32)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return the bits of float32 values, rounded by numpy or ml_dtypes."""
        with np.errstate(all="ignore"):
            if self.saturates:  # which ml_dtypes does not
                largest = self.values(np.array([self.largest]))[0]
                values = np.clip(values, -largest, largest)
            bits = values.astype(self.dtype).view(f"uint{self.bits}").astype(np.uint32)
        return np.where(np.isnan(values), np.uint32(self.nan), bits)


FORMATS = {
    "float16": Format(
        np.dtype(np.float16), 0x7BFF, False, 0x7FFF,
        ("float16_bits_from_floats", "halves_from_floats<trtc::float16>"),
        ("float_from_float16_bits", "float_from_half<trtc::float16>"),
    ),
    "bfloat16": Format(
        np.dtype(ml_dtypes.bfloat16), 0x7F7F, False, 0x7FFF,
        ("bfloat16_bits_from_floats", "halves_from_floats<trtc::bfloat16>"),
        ("float_from_half<trtc::bfloat16>",),
    ),
    "float8_e4m3": Format(
        np.dtype(ml_dtypes.float8_e4m3fn), 0x7E, True, 0x7F,
        ("float8_e4m3_bits_from_floats",), ("float_from_float8_e4m3",),
    ),
    "float8_e5m2": Format(
        np.dtype(ml_dtypes.float8_e5m2), 0x7B, True, 0x7F,
        ("float8_e5m2_bits_from_floats",), ("float_from_float8_e5m2",),
    ),
}  # fmt: skip
NARROWING = [(name, helper) for name, form in FORMATS.items() for helper in form.to]
WIDENING = [(name, helper) for name, form in FORMATS.items() for helper in form.back]

FIELDS = (Field("values", "pointer"), Field("words", "pointer"), Field("count", "int64"))
NARROW = """#include "types.cuh"

TRTC_ENTRY void narrow(TRTC_PARAMETER Params params) {
  const float* values = static_cast<const float*>(params.values);
  for (trtc::int64 i = trtc::cta_index() * THREADS + trtc::thread_index(); i < params.count;
       i += trtc::ctas_in_grid() * THREADS) {
    static_cast<trtc::uint32*>(params.words)[i] = trtc::HELPER(values[2 * i], values[2 * i + 1]);
  }
}
"""
WIDEN = """#include "types.cuh"

TRTC_ENTRY void widen(TRTC_PARAMETER Params params) {
  for (trtc::int64 i = trtc::cta_index() * THREADS + trtc::thread_index(); i < params.count;
       i += trtc::ctas_in_grid() * THREADS) {
    static_cast<float*>(params.values)[i] = trtc::HELPER(static_cast<const trtc::uint32*>(params.words)[i]);
  }
}
"""


def kernel(symbol: str, text: str, helper: str, device: SimulatedDevice) -> Kernel:
    return MANAGER.compile(f"#define THREADS {THREADS}\n{text.replace('HELPER', helper)}", symbol, FIELDS, device)


def launch(compiled: Kernel, values: np.ndarray, words: np.ndarray) -> None:
    compiled.launch(
        LaunchConfig((CTAS, 1, 1), (THREADS, 1, 1)), {"values": values, "words": words, "count": len(words)}
    )


def narrowed(compiled: Kernel, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    values = np.stack([low, high], -1)
    words = np.full(len(values), 0xDEADBEEF, np.uint32)
    launch(compiled, values, words)
    return words


def assert_narrowed(form: Format, compiled: Kernel, low: np.ndarray, high: np.ndarray) -> None:
    """Hold whole words against the reference: where each value lies, and nothing beside the two."""
    words = narrowed(compiled, low, high)
    expected = form.rounded(low) | form.rounded(high) << form.bits
    wrong = np.flatnonzero(words != expected)
    assert wrong.size == 0, f"{wrong.size} words are wrong, such as " + "; ".join(
        f"({low[i]!r} = {low.view(np.uint32)[i]:#010x}, {high[i]!r} = {high.view(np.uint32)[i]:#010x}) -> "
        f"{words[i]:#010x}, not {expected[i]:#010x}"
        for i in wrong[:4]
    )


def edges(form: Format) -> np.ndarray:
    """Return where rounding changes, for every pair of neighbours: the two, the middle, and the floats around each.

    Rounding is monotone, and constant between these: what holds for them holds for every float.
    """
    ends = form.values(np.arange(form.largest + 1)).astype(np.float64)
    # The value that would follow, if the exponent had no end: the middle before it is where infinity begins.
    beyond = 2 * ends[-1] - ends[-2]
    with np.errstate(over="ignore"):
        ends = np.append(ends, beyond)
        middles = (ends[1:] + ends[:-1]) / 2
        points = np.concatenate([ends, middles, [2 * beyond, np.finfo(np.float32).max, np.inf]]).astype(np.float32)
    bits = np.unique(points).view(np.uint32)
    bits = np.unique(np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]))  # behind infinity is a NaN
    return np.concatenate([bits, bits | 0x80000000]).view(np.float32)


def structured() -> np.ndarray:
    """Return every exponent with fractions of one bit, of runs of bits, and all but those; with NaNs of every kind."""
    ones = (1 << 23) - 1
    bit = [1 << k for k in range(23)]
    runs = [(1 << high) - (1 << low) for high in range(24) for low in range(high)]
    fractions = np.array(sorted({0, ones, *bit, *runs, *(ones ^ b for b in bit), *(ones ^ r for r in runs)}))
    exponents = np.arange(256) << 23
    bits = (exponents[:, None] | fractions).ravel().astype(np.uint32)
    return np.concatenate([bits, bits | 0x80000000]).view(np.float32)


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.thorough(share=0.3))], ids=["checked", "fast"])
def device(request: pytest.FixtureRequest) -> SimulatedDevice:
    return SimulatedDevice(checked=request.param)


def test_the_edges_hold_neighbours_and_middles_and_rounding_is_monotone_between_them():
    values = edges(FORMATS["float16"])
    for value in (0.0, 2.0**-24, 2.0**-25, 2.0**-14, 1.0, 1 + 2.0**-11, 65504.0, 65520.0, np.inf):
        for neighbour in (value, *np.nextafter(np.float32(value), np.array([-np.inf, np.inf], np.float32))):
            assert neighbour in values and -neighbour in values
    for form in FORMATS.values():
        ordered = np.sort(values[np.isfinite(values)])
        rounded = form.values(form.rounded(ordered))
        assert (rounded[1:] >= rounded[:-1]).all()  # what `edges` relies on


@pytest.mark.parametrize(("name", "helper"), NARROWING)
def test_every_pair_of_neighbours_is_rounded_to_the_nearest_and_ties_to_even(name, helper, device):
    values = edges(FORMATS[name])
    compiled = kernel("narrow", NARROW, helper, device)
    assert_narrowed(FORMATS[name], compiled, values, values[::-1].copy())


@pytest.mark.parametrize(("name", "helper"), NARROWING)
def test_every_exponent_is_rounded_with_every_fraction_of_some_structure(name, helper):
    values = structured()
    compiled = kernel("narrow", NARROW, helper, CHECKED)
    assert_narrowed(FORMATS[name], compiled, values, np.roll(values, 12345))


@pytest.mark.parametrize(("name", "helper"), NARROWING)
def test_random_bits_are_rounded(name, helper, rng):
    values = rng.integers(0, 1 << 32, 1 << 21, np.uint32).view(np.float32)
    compiled = kernel("narrow", NARROW, helper, CHECKED)
    assert_narrowed(FORMATS[name], compiled, values[: 1 << 20], values[1 << 20 :])


@pytest.mark.parametrize(("name", "helper"), NARROWING)
def test_every_nan_becomes_the_canonical_one(name, helper):
    payloads = np.array([1 << k for k in range(23)] + [(1 << 23) - 1, 0x2AAAAA, 0x555555], np.uint32)
    nans = np.concatenate([payloads | 0x7F800000, payloads | 0xFF800000]).view(np.float32)
    assert np.isnan(nans).all()
    compiled = kernel("narrow", NARROW, helper, CHECKED)
    form = FORMATS[name]
    zeros = np.zeros_like(nans)
    np.testing.assert_array_equal(narrowed(compiled, nans, zeros), form.nan)
    np.testing.assert_array_equal(narrowed(compiled, zeros, nans), form.nan << form.bits)


@pytest.mark.parametrize(("name", "helper"), NARROWING)
def test_the_first_value_is_in_the_low_half(name, helper):
    form = FORMATS[name]
    one, minus_two = (int(form.rounded(np.array([value], np.float32))[0]) for value in (1.0, -2.0))
    assert one != minus_two
    compiled = kernel("narrow", NARROW, helper, CHECKED)
    words = narrowed(compiled, np.array([1.0], np.float32), np.array([-2.0], np.float32))
    assert words[0] == one | minus_two << form.bits


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_what_8_bits_cannot_hold_becomes_the_largest_number(name):
    form = FORMATS[name]
    largest = form.values(np.array([form.largest]))[0]
    assert largest == {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}[name]
    too_large = np.array([largest, np.nextafter(largest, np.inf, dtype=np.float32), 1e30, np.inf], np.float32)
    compiled = kernel("narrow", NARROW, form.to[0], CHECKED)
    expected = form.largest | (form.largest | 0x80) << 8
    np.testing.assert_array_equal(narrowed(compiled, too_large, -too_large), expected)


@pytest.mark.parametrize(("name", "helper"), WIDENING)
def test_every_narrow_value_is_widened_exactly(name, helper, device):
    form = FORMATS[name]
    bits = np.arange(1 << form.bits, dtype=np.uint32)
    compiled = kernel("widen", WIDEN, helper, device)
    values = np.full(len(bits), np.float32(-1.5))
    launch(compiled, values, bits)
    expected = form.values(bits)
    # A NaN stays one; its bits are the machine's.
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
    found, wanted = (
        np.where(np.isnan(expected), np.uint32(CANONICAL_NAN), array.view(np.uint32)) for array in (values, expected)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("name", "helper"), [("float16", WIDENING[1][1]), ("bfloat16", WIDENING[2][1])])
def test_only_the_low_half_of_a_word_is_widened(name, helper, rng):
    assert helper.startswith("float_from_half")
    bits = np.arange(1 << 16, dtype=np.uint32)
    compiled = kernel("widen", WIDEN, helper, CHECKED)
    alone, beside = np.zeros(len(bits), np.float32), np.zeros(len(bits), np.float32)
    launch(compiled, alone, bits)
    launch(compiled, beside, bits | rng.integers(0, 1 << 16, len(bits), np.uint32) << 16)
    np.testing.assert_array_equal(beside.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize(("name", "helper"), NARROWING)
def test_what_was_widened_is_narrowed_to_the_same_bits(name, helper):
    form = FORMATS[name]
    bits = np.arange(1 << form.bits, dtype=np.uint32)
    values = np.zeros(len(bits), np.float32)
    launch(kernel("widen", WIDEN, form.back[0], CHECKED), values, bits)
    words = narrowed(kernel("narrow", NARROW, helper, CHECKED), values, np.zeros_like(values))
    same = np.isfinite(values) | (np.isinf(values) & (not form.saturates))
    np.testing.assert_array_equal(words[same], bits[same])
    assert same.sum() >= 0.8 * len(bits)


# ---- The same helpers as NVRTC compiles them ------------------------------------------------------------------------

EVERY_HELPER = '#include "types.cuh"\n' + "".join(
    f"TRTC_ENTRY void to_{number}(trtc::uint32* words, const float* values) {{\n"
    f"  words[trtc::thread_index()] = trtc::{helper}(values[2 * trtc::thread_index()], values[1]);\n}}\n"
    for number, (_, helper) in enumerate(NARROWING)
) + "".join(
    f"TRTC_ENTRY void back_{number}(float* values, const trtc::uint32* words) {{\n"
    f"  values[trtc::thread_index()] = trtc::{helper}(words[trtc::thread_index()]);\n}}\n"
    for number, (_, helper) in enumerate(WIDENING)
)  # fmt: skip


@pytest.mark.parametrize("architecture", first_of([90, *sorted(STATIC_ARCHITECTURES.keys() - {90})]))
def test_every_helper_compiles_and_uses_the_instruction_where_there_is_one(architecture):
    headers = sources.included(EVERY_HELPER)
    assert headers
    compiled = compiler.compile_program("conversions", EVERY_HELPER, headers, (), architecture)
    assert compiled.kind == "cubin" and compiled.image
    ptx = compiler.compile_program("conversions", EVERY_HELPER, headers, (), architecture, ptx=True).image.decode()
    for instruction in ("cvt.f32.f16", "cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
        assert instruction in ptx
    for instruction in ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"):
        assert (instruction in ptx) == (architecture >= 89)
