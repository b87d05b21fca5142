# SPDX-License-Identifier: Apache-2.0
"""A Vec's elements, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
import vec_elements

from transformer_rtc import SimulatedDevice


@pytest.mark.parametrize(
    "checked", [True, pytest.param(False, marks=pytest.mark.thorough(share=0.3))], ids=["checked", "fast"]
)
@pytest.mark.parametrize("size", vec_elements.SIZES)
@pytest.mark.parametrize("element", vec_elements.TYPES)
def test_elements_of_every_range_are_loaded_and_stored_and_no_others_touched(element, size, checked, rng):
    vec_elements.hold(element, size, SimulatedDevice(checked=checked), rng, lambda array: array.view(np.uint8))
