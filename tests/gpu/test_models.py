# SPDX-License-Identifier: Apache-2.0
"""Whole models on a GPU: a warm-up compiles all that a training step needs."""

from __future__ import annotations

import pytest

import transformer_rtc
from transformer_rtc import operator, warming
from transformer_rtc.cache import DiskCache
from transformer_rtc.kernel_manager import KernelManager

torch = pytest.importorskip("torch")

from transformer_rtc.torch import AddRMSNorm, patch, warmup  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = AddRMSNorm(size), AddRMSNorm(size)
        self.linear, self.last = torch.nn.Linear(size, size), torch.nn.LayerNorm(size)

    def forward(self, x):
        y, residual = self.first(x)
        y, residual = self.second(self.linear(y), residual)
        return self.last(y + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_a_warmup_a_step_compiles_nothing(monkeypatch, tmp_path, dtype):
    manager = KernelManager(DiskCache(str(tmp_path)))
    monkeypatch.setattr(operator, "manager", manager)
    monkeypatch.setattr(warming, "manager", manager)
    # A size of its own: no plan is there yet.
    model = Block(1352 if dtype == torch.float32 else 1360).to("cuda", dtype)
    patch(model)
    records = warmup(model)
    assert records and not any(record.error for record in records)
    manager.freeze()
    for rows in (4, 4096):
        x = torch.randn(rows, model.linear.in_features, device="cuda", dtype=dtype, requires_grad=True)
        model(x).square().mean().backward()
        assert x.grad.isfinite().all()
    assert manager.counts["compile"] == sum(record.status == "compiled" for record in records)
    with pytest.raises(transformer_rtc.UnexpectedCompileError), torch.no_grad():
        model(x)  # without gradients it asks for others
