# SPDX-License-Identifier: Apache-2.0
"""Softmax in the simulator: every way to hold a row, at every length and alignment, in every type."""

from __future__ import annotations

import numpy as np
import pytest
import softmax_checks as checks
import softmax_reference as expected
from norm_checks import covering, first_of
from reference import assert_within
from softmax_checks import CHOSEN, DIVIDED, FLOATS, OF_TYPES, at, bits, call, calls_of, held, poisoned, simulated

from transformer_rtc import arrays, select, softmax
from transformer_rtc.declaration import declaration_of
from transformer_rtc.operator import Operator, native_operator
from transformer_rtc.spec import BFLOAT16, FLOAT32

pytestmark = pytest.mark.usefixtures("kernels", poisoned.__name__)
LENGTHS = (17, 127, 1000, 1, 2, 7, 8, 64, 65, 1023, 1024, 4097)
SHORT = (17, 31, 24, 32, 20, 12, 8, 5, 1)
FEW = (17, *range(1, 33, 5), 49, 33, 40, 57, 63, 64)


@pytest.mark.parametrize(("way", "columns", "dtype"), checks.of_ways(DIVIDED, (1021, 383, 57, 40, 31, 1, 3000)))
def test_every_way_to_hold_a_row_is_within_the_bound_at_every_alignment(way, columns, dtype, rng):
    with held(way) as on:
        for lie in ((0, 0), (3, 0), (0, 1), (8, 24)):
            checks.hold_each(on, rng, 5, columns, dtype, lie)


CALLS = [
    *calls_of(checks.hold_length, LENGTHS, FLOATS[::-1], first=1, share=0.2),
    *calls_of(checks.hold_length, (16385, 50257, 131072), [BFLOAT16], ways=(CHOSEN,)),
    *calls_of(checks.hold_rows_of_few_threads, FEW, FLOATS[::-1], first=1, share=0.15),
    *calls_of(checks.hold_outputs, SHORT, [BFLOAT16, FLOAT32], ways=(CHOSEN,), first=1, share=0.5),
    *calls_of(checks.hold_same_bits, SHORT[:4], first=1, share=0.5),
    *calls_of(checks.hold_types, (300, 17, 20, 32), OF_TYPES, share=0.2),
    *calls_of(checks.hold_in_place, (17, 1001, 1000, 100, 104, 2600), first=1),
    *calls_of(checks.hold_float32, (1000, 10, 4097), share=0.5),
]


@pytest.mark.parametrize(("check", "way", "values"), CALLS)
def test_lengths_places_and_types(check, way, values, rng):
    with held(way) as on:
        check(on, rng, *values)


# Of which some fill all slots: the first ones have the last columns then.
@pytest.mark.parametrize(("way", "columns", "dtype"), checks.of_ways(DIVIDED, (1000, 768, 512, 500, 64, 32)))
def test_a_row_has_the_same_bits_wherever_it_lies(way, columns, dtype, rng):
    with held(way) as on:
        checks.hold_same_bits(on, rng, columns, dtype)


@pytest.mark.thorough(share=0.3)
@pytest.mark.parametrize("way", DIVIDED)
def test_a_row_of_16_bits_has_the_same_bits_in_float32_wherever_it_lies(way, rng):
    with held(way) as on:
        checks.hold_same_bits(on, rng, min(1000, checks.capacity(way, FLOAT32)), BFLOAT16, FLOAT32)


@pytest.mark.parametrize("way", first_of(["chunks", "chunks of CTAs", "chunks of CTAs of a grid"]))
def test_equal_largest_elements_that_later_chunks_exceed_have_the_same_bits_at_every_alignment(way, rng):
    of = ([0, 0.7], [0, 0.9, 1.8])
    x = np.concatenate([rng.choice(np.array(values, np.float32), (6, 1536)) for values in of], axis=1)
    with held(way) as on:
        first, *others = (call(on, "softmax", at(on, x, offset), return_lse=True)[0] for offset in (0, 1, 2, 3))
    for other in others:
        np.testing.assert_array_equal(bits(other), bits(first))


@pytest.mark.parametrize(("columns", "dtype"), covering([17, 3, 8, 32], [BFLOAT16, FLOAT32], share=0.3, first=1))
def test_rows_of_a_thread_take_turns(columns, dtype, rng):
    # A multiprocessor has 2048 threads.
    for rows in (2048, 4100, 6200):
        checks.hold_drawn(simulated(multiprocessors=1), rng, (rows, columns), dtype)


@pytest.mark.parametrize("way", [way for way in DIVIDED if "grid" in way])
def test_ctas_of_a_cooperative_grid_take_several_rows_in_turn(way, rng):
    # One multiprocessor holds 8 or 16 groups of CTAs.
    with held(way, multiprocessors=1) as on:
        checks.hold_each(on, rng, 20, 1000, checks.type_of(way))


_IN_TURN = covering(checks.NAMES, ("", " of a grid"), (BFLOAT16, FLOAT32), share=0.5, first=1)


@pytest.mark.parametrize(("name", "grid", "dtype"), _IN_TURN)
@pytest.mark.parametrize("columns", (1024, 1021, 1020, 516, 8))
def test_rows_that_come_before_their_turn_have_the_bits_of_others(name, columns, dtype, grid, rng):
    # One multiprocessor holds 8 groups of CTAs: each has two or three turns. Rows that are no whole vectors, or not
    # aligned, do not come before theirs.
    logarithm, gap = name == "log_softmax", -columns % 8  # aligned, though they may be no whole vectors
    dy, y = expected.drawn(rng, (20, columns), dtype), rng.uniform(0.1, 1, (20, columns))
    y = (np.log(y) if logarithm else y).astype(dy.dtype)
    found = expected.backward(dy, y, out=dtype, logarithm=logarithm, scale=-0.3)
    first = None
    for way, offset, apart in (("CTAs", 0, 0), ("in turn", 0, 0), ("in turn", 0, gap), ("in turn", 3, 0)):
        with held(way + grid, multiprocessors=1) as on:
            given = at(on, dy, 0, apart)
            for options in ({}, {"out": given}):  # and in place
                dx = call(on, f"{name}_backward", given, at(on, y, offset, apart), scale=-0.3, **options)
                assert_within(dx, found, dtype)
                first = bits(dx) if first is None else first
                np.testing.assert_array_equal(bits(dx), first)


# One array at an address that no vector fits, or of another type, among arrays of one type.
@pytest.mark.parametrize(("operator", "names"), [("softmax", ("x", "out")), ("softmax_backward", ("dy", "y", "out"))])
def test_a_general_kernel_looks_at_every_array(operator, names, rng):
    drawn, on = {name: rng.random((20, 40)) for name in names}, simulated(static=True)

    def found(types, offsets):
        of = {name: (drawn[name].astype(types.get(name, np.float16)), offsets.get(name, 0)) for name in names}
        return call(on, operator, **{name: at(on, *given) for name, given in of.items()})

    for name in names:
        for types, offsets in (({name: np.float32}, {}), ({}, {name: 1})):
            elsewhere = found(types, dict.fromkeys(names, 1))
            np.testing.assert_array_equal(found(types, offsets), elsewhere, f"{name}, {types}")


def test_a_new_length_in_a_bucket_makes_no_plan(monkeypatch, rng):
    asked = []
    declaration = declaration_of("softmax")
    operator = Operator(declaration)
    native = native_operator(
        declaration,
        lambda *request: asked.append(request[4]) or operator._plan(*request),
        operator._check,
        lambda values, direct: arrays.call(native, declaration, values, select.simulating_on_host),
    )
    monkeypatch.setitem(softmax.__globals__, "_softmax", native.entry())
    for columns in (65, 100, 256, 257, 100, 512):
        call(simulated(static=True), "softmax", expected.drawn(rng, (2, columns), FLOAT32))
    assert asked == [128, 256, 512]
