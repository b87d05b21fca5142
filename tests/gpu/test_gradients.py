# SPDX-License-Identifier: Apache-2.0
"""Gradients that torch's autograd records on a GPU, in threads of its own: the bits of the backward operators."""

from __future__ import annotations

import functools

import pytest

import transformer_rtc
from transformer_rtc import using

torch = pytest.importorskip("torch")
randn = functools.partial(torch.randn, device="cuda")
BATCHES = (1, 255, 256, 4096)


def leaf(*shape: int, dtype=torch.bfloat16):
    return randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("implementation", ["rtc", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 1001, 4096, 16384])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gradients_are_the_bits_of_the_backward(implementation, dtype, hidden, norm):
    x, weight, dy = leaf(37, hidden, dtype=dtype), leaf(hidden, dtype=dtype), randn(37, hidden).to(dtype)
    statistics = ("mean", "rstd") if norm == "layer_norm" else ("rstd",)
    with using(implementation):
        y = getattr(transformer_rtc, norm)(x, weight)
    y.backward(dy)  # where nothing is chosen
    with torch.no_grad(), using(implementation):
        expected, *found = getattr(transformer_rtc, norm)(x, weight, **{f"return_{name}": True for name in statistics})
        named = dict(zip(statistics, found, strict=True))
        # With a bias, for which there is a kernel of its own, the sums may have another order.
        dx, dweight = getattr(transformer_rtc, f"{norm}_backward")(dy, x, weight, return_dbias=False, **named)
    assert torch.equal(y, expected) and torch.equal(x.grad, dx) and torch.equal(weight.grad, dweight)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_both_outputs_of_a_fused_add_have_gradients_in_one_launch(name):
    x, residual, weight = leaf(64, 2048), leaf(64, 2048), leaf(2048)
    dy, ds = randn(64, 2048).bfloat16(), randn(64, 2048).bfloat16()
    y, s = getattr(transformer_rtc, name)(x, residual, weight)
    torch.autograd.backward((y, s), (dy, ds))
    with torch.no_grad():
        dx, dweight, *_ = getattr(transformer_rtc, f"{name}_backward")(dy, ds, s, weight)
    bound = 2 * 2.0**-8 * dx.abs().max()  # the forward's statistics may differ by a rounding from those found again
    assert torch.equal(x.grad, residual.grad) and (x.grad - dx).abs().max() <= bound
    assert (weight.grad - dweight).abs().max() <= 2 * 2.0**-8 * dweight.abs().max()


def test_gradients_of_softmax_are_the_bits_of_the_backward():
    x, mask, sink = leaf(2, 4, 64, 300), leaf(64, 300, dtype=torch.float32), leaf(4)
    y, lse = transformer_rtc.softmax(x, mask=mask, sink=sink, causal="aligned", scale=0.3, return_lse=True)
    dy = randn(y.shape).bfloat16()
    y.backward(dy)
    with torch.no_grad():
        expected = transformer_rtc.softmax_backward(
            dy, y, scale=0.3, causal="aligned", sink=sink, lse=lse, mask=mask, return_dsink=True, return_dmask=True
        )
    for one, of in zip((x, sink, mask), expected, strict=True):
        assert torch.equal(one.grad, of)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_row_has_the_same_bits_in_any_batch_and_sums_the_same_in_any_run(norm):
    x, dy, weight = randn(max(BATCHES), 4096).bfloat16(), randn(max(BATCHES), 4096).bfloat16(), leaf(4096)
    seen = []
    for rows in BATCHES:
        part = x[:rows].clone().requires_grad_()
        y = getattr(transformer_rtc, norm)(part, weight)
        y.backward(dy[:rows])
        seen.append((y[0].detach().clone(), part.grad[0].clone()))
    assert all(torch.equal(one, of) for found in seen[1:] for one, of in zip(found, seen[0], strict=True))
    sums = []
    for _ in range(20):
        weight.grad = None
        getattr(transformer_rtc, norm)(x, weight).backward(dy)
        sums.append(weight.grad.clone())
    assert all(torch.equal(one, sums[0]) for one in sums)


def test_a_small_model_learns_like_torchs():
    def losses(norm) -> list[float]:
        torch.manual_seed(3)
        first, second = (torch.nn.Linear(64, 64).cuda() for _ in range(2))
        weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), weight], lr=0.1)
        x, target = randn(128, 64), randn(128, 64)
        found = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (second(norm(first(x), weight)) - target).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours = losses(lambda x, w: transformer_rtc.rms_norm(x, w, 1e-6))
    theirs = losses(lambda x, w: torch.nn.functional.rms_norm(x, (64,), w, 1e-6))
    assert ours[-1] < ours[0] and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.without_jax
def test_a_recorded_call_can_be_captured_with_its_backward():
    x, weight = leaf(16, 4096), leaf(4096)
    weight.grad = x.grad = None
    dy = randn(16, 4096).bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(transformer_rtc.rms_norm(x, weight), (x, weight), dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [one.clone() for one in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for one in found:
        one.zero_()
    graph.replay()
    assert all(torch.equal(one, of) for one, of in zip(found, expected, strict=True))


def test_what_autograd_saved_and_an_output_overwrites_is_told():
    x, weight = leaf(16, 4096), leaf(4096)
    h = x * 1
    y = transformer_rtc.rms_norm(h, weight)
    with torch.no_grad():
        transformer_rtc.rms_norm(h, weight, out=h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
