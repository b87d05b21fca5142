# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from on_gpu import CLUSTER, FIELDS, MEET, Memory, resident

from transformer_rtc import DeviceNotFoundError, Field, LaunchConfig, _native, device_limits
from transformer_rtc.errors import ArgumentError, DriverError, LaunchError

FILL = """#include "platform.cuh"
extern "C" __global__ void fill(Params params) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < params.count) static_cast<float*>(params.out)[i] = params.value + i;
}
"""
SHARED = """
extern __shared__ float dynamic[];
extern "C" __global__ void shared(Params params) {
  __shared__ float fixed[STATIC];
  for (int i = threadIdx.x; i < params.count; i += blockDim.x) dynamic[i] = i;
  for (int i = threadIdx.x; i < STATIC; i += blockDim.x) fixed[i] = -1;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < STATIC; ++i) sum += fixed[i];
  if (threadIdx.x == 0) static_cast<float*>(params.out)[0] = dynamic[params.count - 1] + (sum == -STATIC ? 0 : -1e9f);
}
"""


def shared_text(static_floats: int) -> str:
    return f"#define STATIC {static_floats}\n{SHARED}"


@pytest.fixture
def fill(manager):
    return manager.compile(FILL, "fill", FIELDS, 0)


def test_a_callers_kernel_is_compiled_loaded_and_launched(fill, manager):
    memory = Memory(1000)
    params = {"out": memory.pointer, "value": 0.5, "count": 900}
    fill.launch(LaunchConfig((8, 1, 1), (128, 1, 1)), params)
    found = memory.read(np.float32)
    np.testing.assert_array_equal(found[:900], np.arange(900) + 0.5)
    assert np.isnan(found[900:]).all()
    memory = Memory(1000)
    fill.launch_plain((8, 1, 1), (128, 1, 1), fill.params.pack(**{**params, "out": memory.pointer}))
    np.testing.assert_array_equal(memory.read(np.float32)[:900], np.arange(900) + 0.5)
    assert manager.compile(FILL, "fill", FIELDS, 0) is fill
    assert manager.counts == {"compile": 1, "load": 1}


def test_a_kernel_without_parameters_is_launched(manager):
    kernel = manager.compile('extern "C" __global__ void nothing() {}', "nothing", (), 0)
    kernel.launch_plain((1, 1, 1), (32, 1, 1), b"")
    _native.synchronize_stream(0, 0)


def test_parameters_of_another_size_are_refused(fill):
    for params in (b"", bytes(fill.params.size - 1), bytes(fill.params.size + 1)):
        with pytest.raises(ArgumentError, match=f"fill takes 16 bytes of parameters; {len(params)} were given"):
            fill.launch_plain((1, 1, 1), (32, 1, 1), params)
    with pytest.raises(ArgumentError, match="values for out, value, count expected"):
        fill.launch_plain((1, 1, 1), (32, 1, 1), {"out": 0})


@pytest.mark.parametrize("fields", [FIELDS[:1], (*FIELDS, Field("more", "int64"))])
def test_fields_of_another_size_than_the_loaded_kernels_are_refused(manager, fields):
    if _native.driver_version() < 12040:
        pytest.skip("this driver does not tell a kernel's parameters")
    text = 'struct Mine { void* out; long long count; };\nextern "C" __global__ void mine(Mine mine) {}'
    with pytest.raises(LaunchError, match="mine takes 16 bytes of parameters, and its fields describe"):
        manager.compile(text, "mine", fields, 0)
    assert manager.compile(text, "mine", FIELDS, 0).params.size == 16


def test_an_entry_that_is_not_in_the_program_is_an_error_that_names_it(manager):
    with pytest.raises(ArgumentError, match="__global__ other; its entries are: fill"):
        manager.compile(FILL, "other", FIELDS, 0)


def test_a_device_that_is_not_there_is_an_error(manager):
    with pytest.raises(DeviceNotFoundError, match="there is no CUDA device 1000"):
        manager.compile(FILL, "fill", FIELDS, 1000)
    with pytest.raises(DeviceNotFoundError, match="there is no CUDA device 1000"):
        device_limits(1000)


def test_a_launch_that_the_driver_refuses_is_an_error(fill):
    with pytest.raises(DriverError, match="cuLaunchKernelEx: CUDA_ERROR"):
        fill.launch_plain((1, 1, 1), (2048, 1, 1), bytes(16))


# ---- Cooperative launches and clusters -------------------------------------------------------------------------------


def test_a_cooperative_grid_of_all_that_can_be_resident_meets(manager):
    kernel = manager.compile(MEET, "meet", FIELDS[:1], 0)
    ctas = resident(kernel, 256)
    memory = Memory(2, 0)
    kernel.launch_cooperative((ctas, 1, 1), (256, 1, 1), {"out": memory.pointer})
    np.testing.assert_array_equal(memory.read(), [ctas, ctas])


def test_a_cooperative_grid_that_is_too_large_raises_with_both_numbers(manager):
    kernel = manager.compile(MEET, "meet", FIELDS[:1], 0)
    ctas = resident(kernel, 256)
    memory = Memory(2, 0)
    with pytest.raises(
        LaunchError, match=f"cooperative grid of {ctas + 1} CTAs must be resident; cuda:0 can hold {ctas} "
    ):
        kernel.launch_cooperative((ctas + 1, 1, 1), (256, 1, 1), {"out": memory.pointer})
    with pytest.raises(LaunchError, match=f"cooperative grid of {2 * ctas} CTAs"):
        kernel.launch_cooperative((ctas, 2, 1), (256, 1, 1), {"out": memory.pointer})
    np.testing.assert_array_equal(memory.read(), [0, 0])


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_cluster_is_an_attribute_of_the_launch(manager, size):
    if size > device_limits(0).max_cluster_size:
        pytest.skip(f"this device has no clusters of {size}")
    kernel = manager.compile(CLUSTER, "ranks", FIELDS[:1], 0)
    memory = Memory(4 * size)
    config = LaunchConfig((3 * size, 1, 1), (64, 1, 1), cluster=(size, 1, 1))
    assert kernel.prepare(config) >= size
    assert kernel.max_active_clusters((64, 1, 1), (size, 1, 1)) * size == kernel.prepare(config)
    kernel.launch(config, {"out": memory.pointer})
    np.testing.assert_array_equal(memory.read()[: 3 * size], [size * 100 + rank for rank in range(size)] * 3)
    assert (memory.read()[3 * size :] == -1).all()


def test_a_cluster_that_cannot_be_resident_raises_with_both_numbers(manager):
    if device_limits(0).max_cluster_size == 1:
        pytest.skip("this device has no clusters")
    kernel = manager.compile(CLUSTER, "ranks", FIELDS[:1], 0)
    with pytest.raises(LaunchError, match=r"ranks: 64 CTAs of .* must be resident together; cuda:0 can hold 0"):
        kernel.launch(LaunchConfig((64, 1, 1), (1024, 1, 1), cluster=(64, 1, 1)), {"out": 0})


# ---- Shared memory, attributes, occupancy ---------------------------------------------------------------------------


def use_shared(kernel, dynamic: int) -> None:
    memory, count = Memory(1), dynamic // 4
    params = {"out": memory.pointer, "value": 0.0, "count": count}
    kernel.launch(LaunchConfig((1, 1, 1), (256, 1, 1), dynamic_shared_memory=dynamic), params)
    assert memory.read(np.float32)[0] == count - 1


def test_dynamic_shared_memory_beyond_48_kib(manager):
    kernel = manager.compile(shared_text(1), "shared", FIELDS, 0)
    most = device_limits(0).shared_memory_per_cta - kernel.static_shared_memory
    for dynamic in (4, 47 * 1024, 48 * 1024 + 4, most // 4 * 4, 64 * 1024, 1024):
        use_shared(kernel, dynamic)


def test_static_and_dynamic_shared_memory_beyond_48_kib_together(manager):
    kernel = manager.compile(shared_text(5 * 1024), "shared", FIELDS, 0)
    assert kernel.static_shared_memory == 20 * 1024
    use_shared(kernel, 40 * 1024)


def test_more_shared_memory_than_a_cta_can_have_is_an_error(manager):
    kernel = manager.compile(shared_text(1), "shared", FIELDS, 0)
    with pytest.raises((LaunchError, DriverError)):
        use_shared(kernel, device_limits(0).shared_memory_per_cta + 4)
    use_shared(kernel, 1024)


def test_attributes_are_the_loaded_kernels(manager, fill):
    kernel = manager.compile(shared_text(300), "shared", FIELDS, 0)
    assert kernel.static_shared_memory == 1200 and fill.static_shared_memory == 0
    assert fill.local_memory == 0 and 1 <= fill.registers <= 255 and fill.max_threads == 1024
    kernel.max_dynamic_shared_memory = 64 * 1024
    assert kernel.max_dynamic_shared_memory == 64 * 1024
    text = 'extern "C" __global__ void __launch_bounds__(96) bounded() {}'
    assert manager.compile(text, "bounded", (), 0).max_threads == 96


def test_local_memory_is_told(manager):
    # Indices that nobody knows before the launch keep the array out of registers.
    text = (
        'extern "C" __global__ void local(Params params) {\n  float values[64];\n'
        "  for (int i = 0; i < 64; ++i) values[i * params.count & 63] = i;\n"
        "  static_cast<float*>(params.out)[0] = values[params.count >> 3 & 63];\n}"
    )
    assert manager.compile(text, "local", FIELDS, 0).local_memory >= 256


def test_occupancy_falls_with_threads_and_shared_memory(fill):
    few, many = fill.max_active_ctas((32, 1, 1)), fill.max_active_ctas((1024, 1, 1))
    assert few > many >= 1
    shared = device_limits(0).shared_memory_per_cta
    fill.max_dynamic_shared_memory = shared
    assert fill.max_active_ctas((32, 1, 1), shared) == 1


def test_a_cache_preference_is_set_and_another_is_refused(fill):
    for preference in ("none", "shared", "l1", "equal"):
        fill.set_cache_preference(preference)
    with pytest.raises(ArgumentError, match="preference is 'l2'; it takes none, shared, l1, equal"):
        fill.set_cache_preference("l2")


def test_the_limits_are_the_devices(torch):
    limits = device_limits(0)
    properties = torch.cuda.get_device_properties(0)
    assert limits.architecture == 10 * properties.major + properties.minor
    assert limits.shared_memory_per_cta == properties.shared_memory_per_block_optin
    assert (limits.max_cluster_size > 1) == (limits.architecture >= 90)
