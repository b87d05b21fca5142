# SPDX-License-Identifier: Apache-2.0
"""What the demonstration has torch compute is what it holds our results against."""

from __future__ import annotations

import pytest
import torch

from transformer_rtc import demo_speed
from transformer_rtc.demo_cases import CASES, forward_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torch_computes_the_same(case, monkeypatch):
    torch.manual_seed(0)
    forward, columns = forward_of(case), 64
    given = [
        torch.randn((4, columns) if letter == "r" else columns, dtype=torch.float64, requires_grad=True)
        for letter in forward.shapes
    ]
    y = case.torch(torch, *given)
    if not case.is_backward:
        exact = case.exact(*(tensor.detach().numpy() for tensor in given))
        assert torch.allclose(y.detach(), torch.from_numpy(exact[0]))
    else:
        dy = torch.randn_like(y)
        # softmax's gradient takes y, and a norm's takes no bias.
        first = [y] if case.name == "softmax_backward" else given
        arguments = [dy, *first][: len(case.shapes)]
        exact = case.exact(*(tensor.detach().numpy() for tensor in arguments))
        for one, right in zip(torch.autograd.grad(y, given, dy), exact, strict=True):
            assert torch.allclose(one, torch.from_numpy(right))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torch_is_timed_forward_and_backward(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = [torch.randn((4, 64) if letter == "r" else 64) for letter in case.shapes]
    assert demo_speed._torch_seconds(torch, case, tensors) > 0
    lacking = case._replace(torch=lambda torch, *_: torch.no_such_function)
    assert demo_speed._torch_seconds(torch, lacking, tensors) is None
