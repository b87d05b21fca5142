# SPDX-License-Identifier: Apache-2.0
"""The operators' calls fuzzed in the simulator, on the general kernels, so that nothing is compiled on the way.

``FUZZED_CALLS=200000`` makes as many in the thorough test, about 150 in a second.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from fuzzed_calls import hold_calls

from transformer_rtc import SimulatedDevice, rms_norm, rms_norm_backward, softmax, using
from transformer_rtc.errors import AllocationError, ArgumentError

pytestmark = pytest.mark.usefixtures("kernels")


MANY = int(os.environ.get("FUZZED_CALLS", "5000"))


@pytest.mark.parametrize("count", [500, pytest.param(MANY, marks=pytest.mark.thorough, id="many")])
def test_every_call_ends_in_an_error_of_ours_or_in_a_right_result(count):
    with using(SimulatedDevice(static=True, checked=True)):
        hold_calls(count)


@pytest.mark.parametrize("shape", [(2**40, 4), (2**20, 2**20, 4), (2**50, 4), (2**58, 4)])
def test_an_expanded_array_whose_output_no_memory_holds_is_refused(shape):
    x = np.broadcast_to(np.ones(4, np.float32), shape)
    with using(SimulatedDevice(static=True, checked=True)):
        for call in (
            lambda: rms_norm(x),
            lambda: rms_norm(x, sm_margin=1),
            lambda: rms_norm_backward(x, x),
            lambda: softmax(x),
            lambda: softmax(x, causal="aligned"),
        ):
            with pytest.raises(
                (AllocationError, ArgumentError), match=r"rows|an output of the shape|must lie in memory"
            ):
                call()
