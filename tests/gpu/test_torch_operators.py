# SPDX-License-Identifier: Apache-2.0
"""The operators of torch on a GPU: compiled, captured into graphs, exported, and under modes and transforms."""

from __future__ import annotations

import pytest

from transformer_rtc import add_rms_norm, layer_norm, rms_norm, softmax
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")


def leaf(*shape: int, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def block(x, residual, weight, bias):
    y, s = add_rms_norm(x, residual, weight, 1e-6)
    return torch.nn.functional.silu(layer_norm(y, weight, bias)) + softmax(s, scale=0.5)


def run(function, *leaves):
    y = function(*leaves)
    return y, torch.autograd.grad(y.square().sum(), leaves)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_block_is_the_eager_one(mode):
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for rows in (48, 48, 48, 80):  # reduce-overhead warms up, captures, and replays
        leaves = leaf(rows, 512), leaf(rows, 512), leaf(512), leaf(512)
        y, gradients = run(compiled, *leaves)
        y, gradients = y.clone(), [one.clone() for one in gradients]
        expected, of_eager = run(block, *leaves)
        # What is around our operators is rounded less often in a compiled graph.
        torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-6)
        for found, wanted in zip(gradients, of_eager, strict=True):
            scale = wanted.float().abs().max().item()
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-5, atol=2**-5 * scale)


def test_an_operator_alone_has_the_bits_of_the_eager_call():
    torch._dynamo.reset()
    x, weight, dy = leaf(37, 1000), leaf(1000), torch.randn(37, 1000, device="cuda").bfloat16()
    compiled = torch.compile(lambda x, weight: rms_norm(x, weight, return_rstd=True), fullgraph=True)
    (y, rstd), (expected, of_eager) = compiled(x, weight), rms_norm(x, weight, return_rstd=True)
    assert y.equal(expected) and rstd.equal(of_eager)
    for found, wanted in zip(*(torch.autograd.grad(out, (x, weight), dy) for out in (y, expected)), strict=True):
        assert found.equal(wanted)


def test_other_numbers_of_rows_compile_nothing():
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (7, 64, 1000):
            x = torch.randn(rows, 512, device="cuda")
            assert compiled(x).equal(rms_norm(x))


def test_a_fake_mode_around_real_tensors_leaves_the_context_alive():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(64, 512, device="cuda")
    expected = rms_norm(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = rms_norm(x)
    assert found.shape == x.shape and found.device == x.device and type(found) is not torch.Tensor
    torch.cuda.synchronize()
    assert rms_norm(x).equal(expected)


def test_a_negated_view_has_its_sign():
    z = torch.randn(64, 1, dtype=torch.complex64, device="cuda")
    view, other = z.conj().imag, torch.randn(64, 1, device="cuda")
    assert view.is_neg()
    assert rms_norm(view).equal(rms_norm(-z.imag.contiguous()))
    assert add_rms_norm(other, view)[1].equal(other - z.imag)


def test_forward_mode_is_refused():
    x = torch.randn(4, 512, device="cuda")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ArgumentError, match="no forward-mode derivative"):
            rms_norm(dual)


def test_each_example_has_the_bits_of_its_own_call():
    x, weight = torch.randn(3, 40, 512, device="cuda"), torch.rand(512, device="cuda")
    found = torch.func.vmap(lambda x: rms_norm(x, weight))(x)
    assert found.equal(rms_norm(x, weight))

    def loss(weight, x):
        return rms_norm(x, weight).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    for row, one in zip(each, x, strict=True):
        leaf = weight.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf, one), leaf)
        torch.testing.assert_close(row, expected)


def test_an_operator_runs_on_torch_s_stream():
    x = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    compiled = torch.compile(rms_norm, fullgraph=True)
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        moved = x * 3
        found = compiled(moved)
    side.synchronize()
    assert found.equal(rms_norm(x * 3))
