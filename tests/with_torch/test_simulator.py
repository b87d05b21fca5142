# SPDX-License-Identifier: Apache-2.0
"""torch's tensors of the host in the simulator."""

from __future__ import annotations

import warnings

import kernel_cache
import numpy as np
import pytest
import reference
import torch

from transformer_rtc import SimulatedDevice, operator, rms_norm, using
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    with using(SimulatedDevice(checked=True)), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.symbol)
def test_torch_tensors_of_the_host(dtype, rng):
    integers, numpy_integers = (torch.int32, np.int32) if dtype is FLOAT32 else (torch.int16, np.int16)
    kind = getattr(torch, dtype.name)

    def tensor(host):  # torch knows no ml_dtypes: the bits travel as integers
        return torch.from_numpy(host.view(numpy_integers)).view(kind)

    x, weight = reference.random_rows(rng, (5, 77), dtype), reference.random_weight(rng, 77, dtype)
    y, rstd = rms_norm(tensor(x), tensor(weight), return_rstd=True)
    expected, expected_rstd = reference.rms_norm(x, weight)
    assert type(y) is torch.Tensor and y.dtype == kind and y.device.type == "cpu" and rstd.dtype == torch.float32
    reference.assert_close(y.view(integers).numpy().view(x.dtype), expected, dtype)
    reference.assert_close(rstd.numpy(), expected_rstd, FLOAT32, "rstd")
    out = torch.full_like(y, float("nan"))
    assert rms_norm(tensor(x), tensor(weight), out=out) is out
    assert torch.equal(out.view(integers), y.view(integers))
    in_place = tensor(x.copy())
    assert rms_norm(in_place, tensor(weight), out=in_place) is in_place
    assert torch.equal(in_place.view(integers), y.view(integers))
    with pytest.raises(ArgumentError, match="same framework"):
        rms_norm(tensor(x), weight)


def test_torch_tensors_that_require_grad_have_gradients():
    x, weight = torch.ones(4, 64), torch.nn.Parameter(torch.ones(64))
    assert rms_norm(x, weight).requires_grad
    with torch.no_grad():
        assert not rms_norm(x, weight).requires_grad
    assert not rms_norm(x, weight.detach()).requires_grad
