"""The operators' calls fuzzed in the simulator, on the general kernels, so that nothing is compiled on the way.

5,000 calls; ``FUZZED_CALLS=200000`` makes as many, about 150 in a second.
"""

from __future__ import annotations

import os

import pytest
from fuzzed_calls import hold_calls

from transformer_rtc import SimulatedDevice, using


@pytest.mark.usefixtures("kernels")
def test_every_call_ends_in_an_error_of_ours_or_in_a_right_result():
    with using(SimulatedDevice(static=True, checked=True)):
        hold_calls(int(os.environ.get("FUZZED_CALLS", "5000")))
