# SPDX-License-Identifier: Apache-2.0
"""The same text on a GPU and in the simulator: the same bits, but for what an approximate instruction decides."""

from __future__ import annotations

import dataclasses

import calls
import numpy as np
import pytest
import reference
import vec_elements
from cases import CASES, FLOATS, Case
from frameworks import bits

import transformer_rtc
from transformer_rtc import Field, LaunchConfig, SimulatedDevice, device_limits, using
from transformer_rtc.device import Gpu
from transformer_rtc.spec import ARCHITECTURES

_MOST_SIMULATED = 1 << 18  # elements of all rows


@pytest.fixture
def simulated() -> SimulatedDevice:
    architecture = device_limits(0).architecture
    if architecture not in ARCHITECTURES:
        pytest.skip(f"the simulator has no sm_{architecture}")
    # As many, for a row is shared by no more CTAs than can be resident together.
    return SimulatedDevice(architecture, multiprocessors=Gpu(0).multiprocessors)


def run(implementation: str | SimulatedDevice, case: Case, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a case on arrays of the host."""
    with using(implementation):
        return calls.call(case, given, calls.made_values(case))


SMALL = [case.shorter(_MOST_SIMULATED, 5) for case in CASES if case.hidden <= _MOST_SIMULATED]
# Where nothing is added to y, which may cancel what it is added to.
ONE_NUMBER = [
    case for case in SMALL
    if case.operator == "rms_norm" and case.bias is None and case.out in FLOATS and case.heads == 0
]  # fmt: skip


@pytest.mark.parametrize("implementation", ["rtc", "static"])
@pytest.mark.parametrize("case", ONE_NUMBER[::2], ids=lambda case: case.name)
def test_results_differ_only_by_the_approximate_instruction(simulated, rng, case, implementation):
    # rsqrt.approx is within 2 ulp on the GPU and correctly rounded in the simulator. One Newton step leaves a part of
    # an ulp of that in a float32.
    given = calls.make_inputs(rng, case)
    of_gpu = run(implementation, case, given)
    of_simulator = run(dataclasses.replace(simulated, static=implementation == "static"), case, given)
    differ = {}
    for name, dtype in calls.result_types(case).items():
        a, b = of_gpu[name], of_simulator[name]
        assert reference.ulps(a, b.astype(np.float64), dtype).max(initial=0) <= 1, name
        differ[name] = f"{np.count_nonzero(bits(a) != bits(b))} of {a.size}"
    print(f"{implementation} {case.name}: by 1 ulp differ {differ}")


@pytest.mark.parametrize("share", range(8))
@pytest.mark.usefixtures("exact")
def test_results_are_the_same_bits_without_the_approximate_instruction(simulated, rng, share):
    for case in SMALL[3::7][share::8]:
        given = calls.make_inputs(rng, case)
        of_gpu, of_simulator = run("rtc", case, given), run(simulated, case, given)
        for name, array in of_gpu.items():
            # Which rows a group adds up depends on how many groups the device holds.
            if name not in ("dweight", "dbias"):
                np.testing.assert_array_equal(bits(array), bits(of_simulator[name]), err_msg=f"{name} of {case.name}")


# What an instruction gives, beside the same in plain arithmetic, for the floats [first, first + threads).
COMPARE = """
#include "types.cuh"
extern "C" __global__ void compare(const Params p) {
  using namespace trtc;
  unsigned wrong[6] = {};
  for (unsigned i = 0; i < p.each; ++i) {
    const unsigned bits = (p.first + blockIdx.x * blockDim.x + threadIdx.x) * p.each + i;
    const float value = __uint_as_float(bits);
    wrong[0] += (float16_bits_from_floats(value, 0.0f) & 0xffffu) != float16_from_float(value);
    wrong[1] += (bfloat16_bits_from_floats(value, 0.0f) & 0xffffu) != bfloat16_from_float(value);
    wrong[2] += (float8_e4m3_bits_from_floats(value, 0.0f) & 0xffu) != float8_e4m3_from_float(value);
    wrong[3] += (float8_e5m2_bits_from_floats(value, 0.0f) & 0xffu) != float8_e5m2_from_float(value);
    if (bits < 0x10000u) {
      const float wide = float_from_float16_bits(static_cast<uint16>(bits)), portable = float_from_float16(bits);
      wrong[4] += __float_as_uint(wide) != __float_as_uint(portable) && !(wide != wide && portable != portable);
    }
    const float exact = static_cast<float>(1.0 / sqrt(static_cast<double>(value)));
    const int apart = __float_as_int(approximate_rsqrt(value)) - __float_as_int(exact);
    wrong[5] += value > 0.0f && value < __uint_as_float(0x7f800000u) && (apart > 2 || apart < -2);
  }
  for (int i = 0; i < 6; ++i) atomicAdd(static_cast<unsigned*>(p.wrong) + i, wrong[i]);
}
"""


def test_conversions_agree_on_every_float():
    torch = pytest.importorskip("torch")
    wrong = torch.zeros(6, dtype=torch.int32, device="cuda")
    fields = (Field("wrong", "pointer"), Field("first", "uint32"), Field("each", "uint32"))
    kernel = transformer_rtc.manager.compile(COMPARE, "compare", fields, 0)
    kernel.launch(LaunchConfig((1 << 14, 1, 1), (256, 1, 1)), {"wrong": wrong.data_ptr(), "first": 0, "each": 1 << 10})
    torch.cuda.synchronize()
    assert wrong.tolist() == [0] * 6, "float16, bfloat16, e4m3, e5m2, from float16, rsqrt beyond 2 ulp"


@pytest.mark.parametrize("size", vec_elements.SIZES)
@pytest.mark.parametrize("element", vec_elements.TYPES)
def test_elements_of_every_range_are_loaded_and_stored_and_no_others_touched(element, size, rng, torch):
    vec_elements.hold(element, size, 0, rng, lambda array: torch.from_numpy(array.view(np.uint8).copy()).cuda())
