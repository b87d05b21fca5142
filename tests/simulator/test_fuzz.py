"""The operators' calls fuzzed in the simulator, on the general kernels, so that nothing is compiled on the way.

5,000 calls; ``FUZZED_CALLS=200000`` makes as many, in about as many times the time.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from bad_values import FUNCTIONS
from fuzzed_calls import Call, calls, run
from hypothesis import HealthCheck, Phase, given, settings

from transformer_rtc import SimulatedDevice, using

CALLS = int(os.environ.get("FUZZED_CALLS", "5000"))


@pytest.mark.usefixtures("kernels")
def test_every_call_ends_in_an_error_of_ours_or_in_a_right_result():
    ended: Counter[str] = Counter()

    @settings(
        max_examples=CALLS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def one(call: Call) -> None:
        run(call, ended)

    with using(SimulatedDevice(static=True, checked=True)):
        one()
    print(dict(ended))
    # It has tried both ends, and of every function the right one.
    assert all(ended[name] for name in FUNCTIONS) and CALLS / 5 < ended["refused"] < 4 * CALLS / 5, ended
