# SPDX-License-Identifier: Apache-2.0
"""Architectures that the package brings no compiled kernels for: they are warmed up like the others."""

from __future__ import annotations

import kernel_cache
import pytest
from kernels import call, complaints, kernels_of, softmax_requests

from transformer_rtc import KernelManager, compiler, warming, warmup
from transformer_rtc.cache import DiskCache
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, RESIDENT, STATIC_ARCHITECTURES

OTHERS = sorted(ARCHITECTURES.keys() - STATIC_ARCHITECTURES.keys())


def compile_program(symbol, program, headers, options, architecture):
    return kernel_cache.compile_with_report(symbol, program, options, architecture)


@pytest.mark.parametrize("architecture", OTHERS)
def test_a_warm_up_without_a_gpu_compiles_kernels_that_fit(architecture, monkeypatch):
    if architecture not in compiler._open().nvrtc.architectures:
        pytest.skip(f"NVRTC {compiler._open().version} does not compile for sm_{architecture}")
    monkeypatch.setattr(warming, "manager", KernelManager(DiskCache(None), compile_program))
    operators = ["rms_norm", "layer_norm_backward", "softmax"]
    done = warmup(operators, "bfloat16", 4096, architectures=f"sm_{architecture}", unaligned=False)
    assert {record.status for record in done} == {"compiled"} and len(done) >= len(operators)
    limits, (threads, _) = ARCHITECTURES[architecture], RESIDENT[architecture]
    requests = [call(operator, 4096, BFLOAT16).request for operator in operators[:2]]
    requests += [one for one in softmax_requests() if one.columns == 4096][:1]
    for kernel in (one for request in requests for one in kernels_of(request, limits)):
        assert complaints(kernel) == []
        assert kernel.rule.threads <= threads
