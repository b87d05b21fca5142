# SPDX-License-Identifier: Apache-2.0
"""The operators' calls fuzzed on a GPU, with the kernels that the package brings; fewer of them than in the simulator.

``FUZZED_CALLS=200000`` makes as many.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from fuzzed_calls import hold_calls

from transformer_rtc import _native, rms_norm, static, using


@pytest.mark.skipif(not static.available(), reason="this installation was built without static kernels")
def test_every_call_ends_in_an_error_of_ours_or_in_a_right_result_with_the_context_alive():
    with using("static"):
        hold_calls(int(os.environ.get("FUZZED_CALLS", "500")))
        device = _native.current_device()
        _native.synchronize_stream(device, _native.own_stream(device))
        np.testing.assert_array_equal(rms_norm(np.ones((4, 64), np.float32), eps=0.0), np.ones((4, 64)))
