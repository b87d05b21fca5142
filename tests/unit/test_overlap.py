# SPDX-License-Identifier: Apache-2.0
"""What is written overlaps nothing else, and where rows lie is told by two strides: of views of no memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import BASE, PLACES, Recorder, view

from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

OUT = PLACES["out"]
BYTES = 6 * 4 * 16 * 4  # of a view, whose rows have 64
WEIGHT = (16,)

# One of each kind: which of them are refused is held below, to a list of every element.
REFUSED = [
    ({"out": view(at=BASE + 64)}, "out must be x itself or not overlap it"),
    ({"x": view(dtype=BFLOAT16), "out": view(dtype=FLOAT16)}, "out must be x itself or not overlap it"),
    ({"x": view(strides=(0, 0, 1)), "out": view()}, "out must be x itself or not overlap it"),
    ({"residual": view(at=OUT), "out": view(at=OUT + 64)}, "out must be residual itself or not overlap it"),
    ({"residual": view(at=BASE + 64), "out": view()}, "out must be residual itself or not overlap it"),
    ({"residual": view(at=OUT), "residual_out": view(at=OUT + 64)}, "residual_out must be residual itself or not over"),
    ({"out": view(at=OUT), "weight": view(WEIGHT, at=OUT + BYTES - 4)}, "out must not overlap weight"),
    ({"out": view(at=OUT), "weight": view((4, 16), at=OUT - 4 * 64 + 4)}, "out must not overlap weight"),
    ({"out": view(), "weight": view(WEIGHT, at=BASE + 64)}, "out must not overlap weight"),
    ({"out": view(at=OUT), "mean": view((6, 4), at=OUT + 4)}, "out must not overlap mean"),
    ({"out": view(at=OUT), "scale": view((), at=OUT + 8)}, "out must not overlap scale"),
    ({"out": view(at=OUT), "residual_out": view(at=OUT)}, "residual_out must not overlap out"),
    ({"out": view(), "residual_out": view()}, "residual_out must not overlap out"),
    ({"out": view(at=OUT), "amax": view((), at=OUT + 4)}, "amax must not overlap out"),
    ({"amax": view((), at=BASE)}, "amax must not overlap x"),
    ({"weight": view(WEIGHT, at=OUT), "amax": view((1,), at=OUT + 60)}, "amax must not overlap weight"),
    ({"mean": view((6, 4), at=OUT), "amax": view((), at=OUT + 92)}, "amax must not overlap mean"),
    ({"scale": view((), at=OUT), "amax": view((1,), at=OUT)}, "amax must not overlap scale"),
    ({"residual_out": view(at=OUT, strides=(60, 15, 1))}, "residual_out has rows that overlap each other"),
]


@pytest.mark.parametrize(("arrays", "message"), REFUSED)
def test_what_is_written_overlaps_nothing_else(arrays, message):
    with pytest.raises(ArgumentError, match=f"^op: {message}"):
        Recorder()(**{"return_residual": "residual_out" in arrays, **arrays})


def test_two_values_that_are_written_are_not_one(check):
    one = view((1,), at=BASE << 5)
    with pytest.raises(ArgumentError, match=r"^layer_norm: scale_inv must not overlap amax"):
        check(view(), operator="layer_norm", amax=one, scale_inv=one)


def packed(part: int):
    """Return q, k or v of five tokens' with two heads each, in one array."""
    return view((5, 2, 16), strides=(3 * 2 * 16, 16, 1), at=BASE + part * 2 * 16 * 4)


HALVES = [view((4, 32), strides=(64, 1), at=BASE + offset) for offset in (0, 128)]
BESIDE = [view(at=OUT + offset, strides=(128, 32, 1)) for offset in (0, 64)]
ACCEPTED = [
    {"out": view()}, {"x": packed(0), "out": packed(0)}, {"x": packed(0), "out": packed(1)},
    {"x": packed(2), "out": packed(0)}, {"x": HALVES[0], "out": HALVES[1]},
    {"x": view((1, 16)), "weight": view(WEIGHT)}, {"weight": view(WEIGHT), "mean": view((6, 4)), "scale": view(())},
    {"out": view(at=OUT), "residual": view(at=OUT)}, {"out": view(), "residual": view()},
    {"out": view(), "residual_out": view(at=OUT), "residual": view(at=OUT)},
    {"out": view(at=OUT), "residual_out": view(at=OUT + BYTES)}, {"out": BESIDE[0], "residual_out": BESIDE[1]},
    {"out": view(at=BASE + BYTES)}, {"out": view(at=BASE - BYTES)},
]  # fmt: skip


@pytest.mark.parametrize("arrays", ACCEPTED)
def test_neighbours_between_each_others_rows_and_arrays_in_place_are_taken(arrays):
    Recorder()(**{"return_residual": "residual_out" in arrays, **arrays})


# ---- Overlap and strides against a list of every element -------------------------------------------------------------

TYPES = {BFLOAT16: 2, FLOAT32: 4}  # and their bytes
RECORDER = Recorder()


def refused(**arrays) -> str:
    """Return what a call is refused for; nothing where it is not."""
    try:
        RECORDER(**{"return_residual": "residual_out" in arrays, **arrays})
    except ArgumentError as error:
        return str(error)
    return ""


class Drawn:
    """An array among few elements, so that arrays meet often; `apart`, it meets none."""

    def __init__(self, draw, shape, any_strides=True, types=tuple(TYPES), apart=0) -> None:
        self.dtype = draw(st.sampled_from(types))
        self.shape, self.size = shape, TYPES[self.dtype]
        dense = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            dense[axis] = dense[axis + 1] * shape[axis + 1]
        self.strides = [draw(st.integers(-40, 40)) for _ in shape[:-1]] + dense[-1:] if any_strides else dense
        self.offset = apart or draw(st.integers(-60, 60)) * self.size
        self.view = view(shape, self.dtype, BASE + self.offset, tuple(self.strides))
        indices = itertools.product(*(range(extent) for extent in shape))
        starts = [self.offset + self.size * sum(map(int.__mul__, index, self.strides)) for index in indices]
        self.bytes = [byte for start in starts for byte in range(start, start + self.size)]  # twice where it overlaps

    def nests(self) -> bool:
        """Whether each stride spans what lies within it, in either order of the dimensions."""
        reach = sorted((abs(s), n) for s, n in zip(self.strides, self.shape[:-1], strict=False) if n > 1)
        span, nested = self.shape[-1], True
        for stride, extent in reach:
            nested &= stride >= span
            span += stride * (extent - 1)
        return nested

    def meets(self, other: Drawn) -> bool:
        return min(self.bytes) <= max(other.bytes) and min(other.bytes) <= max(self.bytes)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=2).flatmap(
    lambda leading: st.integers(1, 9).map(lambda columns: (*leading, columns))
)


OTHERS = {
    "residual": Drawn, "residual_out": Drawn,
    "weight": lambda draw, shape: Drawn(draw, shape[-1:], any_strides=False),
    "mean": lambda draw, shape: Drawn(draw, shape[:-1], any_strides=False, types=(FLOAT32,)),
    "scale": lambda draw, shape: Drawn(draw, (), any_strides=False, types=(FLOAT32,)),
    "amax": lambda draw, shape: Drawn(draw, (1,), any_strides=False, types=(FLOAT32,)),
}  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_arrays_that_pass_share_no_element_with_what_is_written(data):
    shape = data.draw(SHAPES)
    arrays = {name: Drawn(data.draw, shape) for name in ("x", "out")}
    for name in data.draw(st.lists(st.sampled_from(sorted(OTHERS)), max_size=2, unique=True)):
        arrays[name] = OTHERS[name](data.draw, shape)
    written = [name for name in arrays if name in ("out", "residual_out", "amax")]
    pairs = [(arrays[one], arrays[other], other) for one in written for other in arrays if other != one]
    error = refused(**{name: array.view for name, array in arrays.items()})
    if error:
        nested = all(arrays[name].nests() for name in written if name != "amax")
        assert not nested or any(one.meets(other) for one, other, _ in pairs), error
        return
    for name in written:
        assert len(set(arrays[name].bytes)) == len(arrays[name].bytes)
    for one, other, name in pairs:
        in_place = name in ("x", "residual") and one.dtype == other.dtype and one.bytes == other.bytes
        assert in_place or set(one.bytes).isdisjoint(other.bytes)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_an_out_whose_extent_is_apart_is_refused_only_for_its_own_rows(data):
    shape = data.draw(SHAPES)
    x, out = Drawn(data.draw, shape), Drawn(data.draw, shape, apart=1 << 20)
    error = refused(x=x.view, out=out.view)
    assert (error == "") == out.nests(), error


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_an_array_collapses_exactly_where_two_strides_say_where_each_row_is(data):
    leading = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    unit = data.draw(st.integers(1, 3))
    strides = tuple(data.draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, -1, -6, -24])) * unit for _ in leading)
    indices = itertools.product(*(range(extent) for extent in leading))
    starts = [sum(map(int.__mul__, index, strides)) for index in indices]

    def two_strides(inner: int) -> bool:
        step = starts[1] - starts[0] if inner > 1 else 0
        outer = starts[inner] - starts[0] if inner < len(starts) else 0
        return all(start == i // inner * outer + i % inner * step for i, start in enumerate(starts))

    expected = any(two_strides(inner) for inner in range(1, len(starts) + 1))
    error = refused(x=view((*leading, 1), strides=(*strides, 1)))
    assert "collapse to at most two strides" in error if error else expected
    assert (error == "") == expected
