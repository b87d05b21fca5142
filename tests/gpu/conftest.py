# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import subprocess
import sys

import make_api
import pytest
from cases import FAMILY
from frameworks import Torch
from rigs import Renamed, Rig

import transformer_rtc
from transformer_rtc import device_limits, operator, sources, static
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of, declarations
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.request import LaunchRule

KEPT = 1 << 30  # bytes that torch may keep for later tests
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to the others


@pytest.fixture(params=["rtc", "static"])
def implementation(request):
    """Run a test once for each implementation."""
    if request.param == "static" and not static.available():
        pytest.skip("this installation was built without static kernels")
    assert request.param in transformer_rtc.implementations(transformer_rtc.rms_norm)
    with transformer_rtc.using(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def uncollected():
    """Collect no garbage within a test: what others left would end its captures.

    A graph of torch in a cycle of references, as behind a traceback, a stream, an event or a graph of CuPy, and what
    JAX has compiled end every capture under way when they are freed.
    """
    gc.disable()
    yield
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        # Else a process keeps what its largest test needed, and a dozen of them more than a GPU of 80 GB has.
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked `without_jax` in a process of its own, if this one has loaded JAX."""
    if "jax" not in sys.modules or pyfuncitem.get_closest_marker("without_jax") is None:
        return None
    options = ["-n0", "-q", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"{pyfuncitem.path}::{pyfuncitem.name}"],
        cwd=pyfuncitem.path.parent,  # not a source tree: Python would import from it
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture
def gpu() -> Torch:
    return Torch()


@pytest.fixture
def rig(implementation, gpu) -> Rig:
    """Return what runs the checks that the simulator runs too, on torch's tensors."""
    return Rig(implementation, gpu)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def manager(tmp_path) -> KernelManager:
    """Return a manager with a cache of its own."""
    return KernelManager(DiskCache(str(tmp_path)))


class Limited(Renamed):
    """The family of norms on a device with smaller clusters than it has."""

    def __init__(self, max_cluster_size: int) -> None:
        super().__init__("rms_norm")
        self.max_cluster_size = max_cluster_size
        self.rules: list[LaunchRule] = []

    def specialise(self, request, limits, config=None):
        # Not more than is asked for: where no such cluster can be resident, it tries smaller ones.
        size = min(self.max_cluster_size, limits.max_cluster_size)
        stages = super().specialise(request, limits._replace(max_cluster_size=size), config)
        self.rules.append(stages[0][1])
        return stages


@pytest.fixture(params=[1, 2, 8, 16], ids=lambda size: f"cluster{size}" if size > 1 else "cooperative")
def limited(request):
    """Return rms_norm with a largest cluster, and its family."""
    if request.param > device_limits(0).max_cluster_size:
        pytest.skip(f"this device has no clusters of {request.param}")
    family = Limited(request.param)
    declaration = dataclasses.replace(declaration_of("rms_norm"), family=family)
    function = make_api.function_of(declaration, operator.Operator(declaration).call)

    def call(x, weight, out=None, rstd=False):
        return function(x, weight, out=out, return_rstd=rstd)

    return call, family


@pytest.fixture
def exact(monkeypatch):
    """Have every operator take a correctly rounded square root, on the GPU and in the simulator."""
    text = sources.texts()["ptx.cuh"]
    approximate = re.findall(r'asm\("rsqrt\.approx[^;]*;"[^;]*;', text)
    assert len(approximate) == 1
    monkeypatch.setitem(sources.texts(), "ptx.cuh", text.replace(approximate[0], "result = __frsqrt_rn(value);"))
    monkeypatch.setattr(operator, "manager", KernelManager(DiskCache(None)))
    with without_plans(monkeypatch):
        yield


@pytest.fixture
def cold(monkeypatch, manager):
    """Have every norm compile and load what it needs, whatever was used before; return the manager that does."""
    monkeypatch.setattr(operator, "manager", manager)
    with without_plans(monkeypatch):
        yield manager


@contextlib.contextmanager
def without_plans(monkeypatch):
    """Give the public functions operators that have not been called yet."""
    for name, declaration in declarations().items():
        if declaration.family is FAMILY:
            function = getattr(transformer_rtc, name)
            monkeypatch.setitem(function.__globals__, f"_{name}", operator.Operator(declaration).call)
    yield
