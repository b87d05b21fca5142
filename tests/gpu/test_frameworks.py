# SPDX-License-Identifier: Apache-2.0
"""What frameworks promise of their arrays, and what the operators promise to each framework, on a GPU."""

from __future__ import annotations

import calls
import numpy as np
import pytest
import reference
from cases import CASES, DELAYED, FLOAT8, FLOATS, Case
from frameworks import FRAMEWORKS, bits, inputs
from norm_checks import case_of
from rigs import Rig, assert_same_bits, hold

from transformer_rtc import rms_norm, rms_norm_backward
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

# JAX has no arrays to write to, and CuPy no floats of 8 bits.
OF_EVERY_FRAMEWORK = [
    *[case for case in CASES if case.out in (*FLOATS, None)][3::29],
    case_of("add_layer_norm", 37, 4096, FLOAT16, BFLOAT16),
    case_of("layer_norm_backward", 37, 4096, BFLOAT16, FLOAT32, rstd=True, residual=BFLOAT16),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", OF_EVERY_FRAMEWORK, ids=lambda case: case.name)
def test_every_framework_gives_its_own_arrays_and_the_same_bits(framework, case, implementation, rng):
    rig = Rig(implementation, FRAMEWORKS[framework]())
    given = calls.make_inputs(rng, case)
    arrays = rig.on_device(given)
    results = rig.on_host(rig.call(case, arrays))
    calls.hold_within(case, results, calls.expect(case, given))
    assert_same_bits(rig.on_host(arrays), given, "an input was changed")
    assert_same_bits(calls.call(case, given), results, "staged")


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda dtype: dtype.symbol)
def test_torch_converts_to_8_bits_as_the_reference_does(dtype, gpu, rng):
    # What the operators give is held to the reference, which ml_dtypes converts.
    values = rng.integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    most = np.float32(reference.LARGEST[dtype])
    values = values[np.isfinite(values)].clip(-most, most)
    converted = gpu.array(values).to(gpu.dtype(dtype))
    np.testing.assert_array_equal(bits(gpu.host(converted)), bits(values.astype(reference.NUMPY_TYPES[dtype])))


def test_host_arrays_are_written_where_the_caller_says(implementation, rng):
    # All that is written goes back: two arrays of rows, and single values.
    case = case_of("add_rms_norm", 37, 1000, FLOAT32, out=FLOAT8[0], scaling=DELAYED)
    hold([Rig(implementation)], case, rng)


@pytest.mark.parametrize("framework", ["torch", "cupy", "numpy"])
def test_an_output_of_the_caller_is_returned_and_filled(framework, implementation, rng):
    kind = FRAMEWORKS[framework]()
    for out_type in FLOATS:
        x, weight = inputs(rng, Case(6, 1001, FLOAT16, FLOAT16, out_type, False))
        out = kind.array(np.full(x.shape, np.nan, reference.NUMPY_TYPES[out_type]))
        assert rms_norm(kind.array(x), kind.array(weight), out=out) is out
        reference.assert_close(kind.host(out), reference.rms_norm(x, weight)[0], out_type)


def test_torch_tensors_of_the_host_come_back_to_the_host(torch, implementation, rng):
    for dtype in FLOATS:
        x, _ = inputs(rng, Case(4, 77, dtype, None, dtype, False))
        tensor = torch.from_numpy(bits(x)).view(getattr(torch, dtype.name))
        y = rms_norm(tensor)
        assert y.device.type == "cpu" and y.dtype == tensor.dtype
        numpy_bits = y.view(torch.int32 if dtype is FLOAT32 else torch.int16).numpy()
        reference.assert_close(numpy_bits.view(x.dtype), reference.rms_norm(x)[0], dtype)
        with pytest.raises(ArgumentError, match="weight must be on the host"):
            rms_norm(tensor, torch.ones(77, dtype=tensor.dtype, device="cuda"))
        with pytest.raises(ArgumentError, match="weight must be on the GPU"):
            rms_norm(tensor.cuda(), torch.ones(77, dtype=tensor.dtype))


def test_a_gpu_tensor_that_requires_grad_is_recorded_only_while_grad_mode_is_on(torch):
    x, weight = torch.ones(4, 64, device="cuda"), torch.nn.Parameter(torch.ones(64, device="cuda"))
    assert rms_norm(x, weight).requires_grad
    with torch.no_grad():
        assert not rms_norm(x, weight).requires_grad
    assert not rms_norm(x, weight.detach()).requires_grad
    with pytest.raises(ArgumentError, match=r"^rms_norm_backward: weight requires grad.*torch.no_grad"):
        rms_norm_backward(x, x, weight)


def test_gpu_tensors_that_cannot_be_viewed_are_refused(torch):
    x = torch.ones(4, 64, device="cuda")
    bad = {
        "must be one of": x.double(),
        "must be contiguous in its last dimension": x[:, ::2],
        "two strides": torch.ones(3, 4, 5, 64, device="cuda")[::2, ::2, ::2],
        "at least one dimension": x[0, 0],
    }
    for message, array in bad.items():
        with pytest.raises(ArgumentError, match=message):
            rms_norm(array)
    for message, out in {"overlap": x[:3], "overlap each other": x[:1].expand(3, 64)}.items():
        with pytest.raises(ArgumentError, match=message):
            rms_norm(x[1:], out=out)
    with pytest.raises(ArgumentError, match="same framework"):
        rms_norm(x, np.ones(64, np.float32))


def test_jax_refuses_out_and_tracers_and_keeps_inputs_alive(rng):
    kind = FRAMEWORKS["jax"]()
    jax = kind.module
    x, weight = inputs(rng, Case(64, 4096, BFLOAT16, BFLOAT16, BFLOAT16, False))
    with pytest.raises(ArgumentError, match="out is a JAX array, and those are immutable"):
        rms_norm(kind.array(x), out=kind.array(x))
    with pytest.raises(ArgumentError, match="x is a JAX tracer"):
        jax.jit(rms_norm)(kind.array(x))
    # Inputs that nobody holds, and outputs that feed the next call and JAX's own work.
    expected = x
    y = kind.array(x)
    for _ in range(10):
        y = rms_norm(y * 1, kind.array(weight))
    for _ in range(10):
        expected = rms_norm(expected, weight)
    np.testing.assert_array_equal(bits(kind.host(y)), bits(expected))


def test_a_jax_array_of_the_host_comes_back_to_the_host(rng):
    jax = FRAMEWORKS["jax"]().module
    x, weight = inputs(rng, Case(6, 1000, BFLOAT16, BFLOAT16, BFLOAT16, False))
    cpu = jax.local_devices(backend="cpu")[0]
    y = rms_norm(jax.device_put(x, cpu), jax.device_put(weight, cpu))
    assert y.devices() == {cpu}
    np.testing.assert_array_equal(bits(np.asarray(y)), bits(rms_norm(x, weight)))


def test_an_array_of_another_framework_comes_back_as_our_own(torch, rng):
    x, _ = inputs(rng, Case(6, 1000, FLOAT32, None, FLOAT32, False))
    tensor = torch.from_numpy(x).cuda()
    torch.cuda.synchronize()
    interface = type("Other", (), {"__cuda_array_interface__": tensor.__cuda_array_interface__})()
    dlpack = type(
        "Other",
        (),
        {
            "__dlpack__": lambda self, **options: tensor.__dlpack__(**options),
            "__dlpack_device__": lambda self: tensor.__dlpack_device__(),
        },
    )()
    for other in (interface, dlpack):
        y, rstd = rms_norm(other, return_rstd=True)
        assert (type(y).__name__, y.shape, y.dtype, rstd.shape) == ("DeviceArray", (6, 1000), "float32", (6,))
        back = torch.from_dlpack(y)
        assert back.device.type == "cuda"
        reference.assert_close(back.cpu().numpy(), reference.rms_norm(x)[0], FLOAT32)
    with pytest.raises(ArgumentError, match="an address is no device memory"):
        bad = {**tensor.__cuda_array_interface__, "data": (x.ctypes.data, False)}
        rms_norm(type("Other", (), {"__cuda_array_interface__": bad})())


def test_a_cupy_stream_and_memory_pool_are_used(rng):
    kind = FRAMEWORKS["cupy"]()
    x, _ = inputs(rng, Case(6, 1000, FLOAT32, None, FLOAT32, False))
    x = kind.array(x)
    used = kind.module.get_default_memory_pool().used_bytes()
    y = rms_norm(x)
    assert kind.module.get_default_memory_pool().used_bytes() >= used + y.nbytes
