"""The same text on a GPU and in the simulator: the same bits, but for what an approximate instruction decides."""

from __future__ import annotations

import re

import numpy as np
import pytest
import reference
from cases import CASES, FAMILY, Case

import transformer_rtc
from transformer_rtc import (
    Field,
    KernelManager,
    LaunchConfig,
    SimulatedDevice,
    device_limits,
    dispatch,
    sources,
    using,
)
from transformer_rtc.cache import DiskCache
from transformer_rtc.ops import norms
from transformer_rtc.spec import ARCHITECTURES, FLOAT32

ROWS = 5
_MOST_SIMULATED = 1 << 18  # elements of a row


@pytest.fixture
def simulated() -> SimulatedDevice:
    architecture = device_limits(0).architecture
    if architecture not in ARCHITECTURES:
        pytest.skip(f"the simulator has no sm_{architecture}")
    return SimulatedDevice(architecture)


def run(operator, implementation: str | SimulatedDevice, x: np.ndarray, weight: np.ndarray | None, case: Case):
    with using(implementation):
        values = operator.call(x, weight, 1e-6, 0.5, None, case.out.name, True, None)
    return tuple(np.asarray(value) for value in values)


def inputs(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    x = reference.random_rows(rng, (ROWS, case.hidden), case.x)
    return x, None if case.weight is None else reference.random_weight(rng, case.hidden, case.weight)


def simulators(simulated: SimulatedDevice) -> dict[str, SimulatedDevice]:
    return {"rtc": simulated, "static": SimulatedDevice(simulated.architecture, static=True)}


SMALL = [case for case in CASES[::3] if case.hidden <= _MOST_SIMULATED]


@pytest.mark.parametrize("implementation", ["rtc", "static"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_results_differ_only_by_the_approximate_instruction(simulated, rng, case, implementation):
    # rsqrt.approx is within 2 ulp on the GPU and correctly rounded in the simulator. One Newton step leaves a part of
    # an ulp of that in a float32.
    x, weight = inputs(rng, case)
    y, rstd = run(norms._RMS_NORM, implementation, x, weight, case)
    simulated_y, simulated_rstd = run(norms._RMS_NORM, simulators(simulated)[implementation], x, weight, case)
    differ = {}
    for name, dtype, a, b in (("rstd", FLOAT32, rstd, simulated_rstd), ("y", case.out, y, simulated_y)):
        assert reference.ulps(a, b.astype(np.float64), dtype).max(initial=0) <= 1, name
        differ[name] = f"{np.count_nonzero(a.view(f'u{dtype.bytes}') != b.view(f'u{dtype.bytes}'))} of {a.size}"
    print(f"{implementation} {case.name}: by 1 ulp differ {differ}")


@pytest.fixture
def exact(monkeypatch):
    """Return rms_norm with a correctly rounded square root on both sides."""
    text = sources.texts()["ptx.cuh"]
    approximate = re.findall(r'asm\("rsqrt\.approx[^;]*;"[^;]*;', text)
    assert len(approximate) == 1
    monkeypatch.setitem(sources.texts(), "ptx.cuh", text.replace(approximate[0], "result = __frsqrt_rn(value);"))
    monkeypatch.setattr(dispatch, "manager", KernelManager(DiskCache(None)))
    yield dispatch.Operator("rms_norm_exact", FAMILY, norms._RMS_NORM.arguments)
    del dispatch._operators["rms_norm_exact"]


def test_results_are_the_same_bits_without_the_approximate_instruction(simulated, rng, exact):
    for case in SMALL:
        x, weight = inputs(rng, case)
        of_gpu = run(exact, "rtc", x, weight, case)
        of_simulator = run(exact, simulated, x, weight, case)
        for dtype, a, b in zip((case.out, FLOAT32), of_gpu, of_simulator, strict=True):
            np.testing.assert_array_equal(a.view(f"u{dtype.bytes}"), b.view(f"u{dtype.bytes}"), err_msg=case.name)


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
