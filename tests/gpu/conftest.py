from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import FAMILY
from frameworks import Torch

import transformer_rtc
from transformer_rtc import _native, device_limits, dispatch, static
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import DeviceNotFoundError
from transformer_rtc.manager import KernelManager
from transformer_rtc.ops import norms

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to the others

try:
    _native.current_device()
    NO_GPU = ""
except DeviceNotFoundError as error:
    # Only this: a driver that is too old, or that fails, is a failure.
    NO_GPU = f"tests/gpu needs a GPU: {error}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NO_GPU:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(params=["rtc", "static"])
def implementation(request):
    """Run a test once for each implementation."""
    if request.param == "static" and not static.available():
        pytest.skip("this installation was built without static kernels")
    assert request.param in transformer_rtc.implementations(transformer_rtc.rms_norm)
    with transformer_rtc.using(request.param):
        yield request.param


@pytest.fixture
def gpu() -> Torch:
    return Torch()


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def manager(tmp_path) -> KernelManager:
    """Return a manager with a cache of its own."""
    return KernelManager(DiskCache(str(tmp_path)))


class Limited:
    """The family of norms on a device with smaller clusters than it has."""

    name = FAMILY.name

    def __init__(self, max_cluster_size: int) -> None:
        self.max_cluster_size = max_cluster_size
        self.static, self.static_program = FAMILY.static, FAMILY.static_program
        self.rules: list[dispatch.LaunchRule] = []

    def specialise(self, dtypes, columns, limits):
        # Not more than dispatch asks for: where no such cluster can be resident, it tries smaller ones.
        size = min(self.max_cluster_size, limits.max_cluster_size)
        spec, rule = FAMILY.specialise(dtypes, columns, limits._replace(max_cluster_size=size))
        self.rules.append(rule)
        return spec, rule


@pytest.fixture(params=[1, 2, 8, 16], ids=lambda size: f"cluster{size}" if size > 1 else "cooperative")
def limited(request):
    """Return rms_norm with a largest cluster, and its family."""
    if request.param > device_limits(0).max_cluster_size:
        pytest.skip(f"this device has no clusters of {request.param}")
    family = Limited(request.param)
    name = f"rms_norm_limited_{request.param}"
    operator = dispatch.Operator(name, family, norms._RMS_NORM.arguments)
    yield lambda x, w, out=None, rstd=False: operator.call(x, w, 1e-6, 0.0, out, None, rstd, None), family
    del dispatch._operators[name]
