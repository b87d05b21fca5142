# SPDX-License-Identifier: Apache-2.0
"""An operator that is declared and no more, in the simulator: its output is half as wide as its input."""

from __future__ import annotations

import numpy as np
import pytest
import trial
from trial import on_trial

from transformer_rtc import SimulatedDevice, record, using, warming
from transformer_rtc.errors import ArgumentError, SimulationError
from transformer_rtc.manifest import line, parse
from transformer_rtc.request import Asked

pytestmark = pytest.mark.usefixtures("kernels")
CHECKED = SimulatedDevice(checked=True)


@pytest.fixture
def multiply_halves():
    with on_trial() as function, using(CHECKED):
        yield function


@pytest.mark.parametrize("shape", [(5, 14), (14,), (2, 3, 140), (1, 2), (0, 8), (2, 3, 4, 6)])
def test_an_output_is_half_as_wide_as_its_input(multiply_halves, rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    y, width = multiply_halves(x), shape[-1] // 2
    assert y.shape == (*shape[:-1], width) and y.dtype == np.float32
    np.testing.assert_array_equal(y, x[..., :width] * x[..., width:])


def test_outputs_and_results_have_widths_of_their_own(multiply_halves, rng):
    # Rows of qkv: two strides of x, and others of the output.
    x = rng.standard_normal((3, 9, 2, 8)).astype(np.float32)[:, ::3]
    out = np.full((3, 3, 2, 7), np.nan, np.float32)[..., :4]
    y, widest = multiply_halves(x, out=out, return_widest=True)
    assert y is out
    np.testing.assert_array_equal(out, x[..., :4] * x[..., 4:])
    assert np.isnan(out.base[..., 4:]).all()
    np.testing.assert_array_equal(widest, np.full((3, 3, 2, 12), 4 - 2, np.float32))


REFUSED = [
    ({"x": np.ones((4, 7), np.float32)}, "x must have a multiple of 2 elements in its last dimension; it has 7"),
    ({"x": np.ones((4, 0), np.float32)}, "x must have 1 to 715827882 elements in its last dimension; it has 0"),
    ({"out": np.ones((4, 8), np.float32)}, r"out must have the shape \(4, 4\), as x has \(4, 8\); it has \(4, 8\)"),
    ({"out": np.ones((3, 4), np.float32)}, r"out must have the shape \(4, 4\), as x has \(4, 8\); it has \(3, 4\)"),
    ({"out": np.ones((4, 8), np.float32)[:, ::2]}, "out must be contiguous in its last dimension"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_width_that_does_not_fit_is_refused(multiply_halves, given, message):
    with pytest.raises(ArgumentError, match=f"^multiply_halves: {message}"):
        multiply_halves(**{"x": np.ones((4, 8), np.float32), **given})


def test_an_output_of_another_width_is_not_written_in_place(multiply_halves):
    memory = np.ones((4, 8), np.float32)
    for out in (memory[:, :4], memory[:, 4:]):
        with pytest.raises(ArgumentError, match=r"^multiply_halves: out must be x itself or not overlap it"):
            multiply_halves(memory, out=out)
    # Between its rows there is room.
    apart = np.ones((4, 12), np.float32)
    np.testing.assert_array_equal(multiply_halves(apart[:, :8], out=apart[:, 8:]), np.ones((4, 4), np.float32))


def test_the_simulator_knows_where_such_rows_end(multiply_halves, monkeypatch):
    monkeypatch.setattr(trial, "TEXT", trial.TEXT.replace("column < params.columns", "column <= params.columns"))
    with pytest.raises(SimulationError, match="out_of_bounds"):
        multiply_halves(np.ones((1, 30), np.float32))


def test_it_is_warmed_up_recorded_and_read_like_any_operator(multiply_halves):
    with record() as entries:
        multiply_halves(np.ones((2, 44), np.float32), return_widest=True)
    (entry,) = [one for one in entries if isinstance(one, Asked) and one.request.columns == 22]
    assert parse(line(entry)) == entry
    (request,) = warming._requests("multiply_halves", "float32", 22, False, False, {"return_widest": True})
    assert request == entry.request
    with pytest.raises(ArgumentError, match="a hidden size is 357913942; it must be from 1 to 357913941"):
        warming._requests("multiply_halves", "float32", 357913942, False, False, {})
