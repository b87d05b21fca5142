# SPDX-License-Identifier: Apache-2.0
"""Softmax along any dimension, of tensors: gradients, traces and transforms of the views."""

from __future__ import annotations

import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, log_softmax, softmax, softmax_backward, using
from transformer_rtc.declaration import declarations
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
F = torch.nn.functional

SHAPE = (2, 5, 3, 7)
FORWARD = [name for name, declaration in declarations().items() if declaration.gradient]


@pytest.fixture(autouse=True)
def general_kernels():
    torch.manual_seed(29)
    torch._dynamo.reset()
    with using(SimulatedDevice(static=True)):
        yield
    torch._dynamo.reset()


def leaf(*shape: int, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def along(dim: int, dtype=torch.float32):
    """Return a leaf of `SHAPE` with the elements of a dimension next to each other."""
    moved = torch.randn(SHAPE).movedim(dim, -1).contiguous().to(dtype)
    return moved.movedim(-1, dim).requires_grad_()


def close(found, expected, bound: float = 1e-5) -> None:
    assert found.shape == expected.shape and found.isfinite().all()
    assert (found.double() - expected.double()).abs().max() <= bound * expected.abs().max().clamp(min=1)


# ---- Gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", range(-4, 4))
def test_softmax_and_its_gradient_are_torchs(dim, name):
    x = along(dim)
    wide = x.detach().double().requires_grad_()
    y, expected = getattr(transformer_rtc, name)(x, dim=dim), getattr(torch, name)(wide, dim)
    close(y, expected)
    # Gradients of any strides: as y lies, dense, and of a sum's, which has none.
    for dy in (torch.randn_like(y), torch.randn(SHAPE), torch.ones(()).expand(SHAPE)):
        found = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
        close(found, torch.autograd.grad(expected, wide, dy.double(), retain_graph=True)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_16_bits_are_rounded_once(dtype):
    x = along(1, dtype)
    y = log_softmax(x, dim=1)
    assert y.dtype == dtype and y.shape == SHAPE
    close(y, torch.log_softmax(x.double(), 1), torch.finfo(dtype).eps)
    y.sum().backward()
    assert x.grad.dtype == dtype and x.grad.shape == SHAPE


def test_a_masks_gradient_has_the_masks_shape():
    x, mask = along(1), torch.randn(3, 7, 5).movedim(-1, 0).requires_grad_()  # [5, 3, 7]
    wide = [one.detach().double().requires_grad_() for one in (x, mask)]
    y, expected = softmax(x, dim=1, mask=mask), torch.softmax(wide[0] + wide[1], 1)
    dy = torch.randn(SHAPE)
    found = torch.autograd.grad(y, (x, mask), dy)
    for one, other in zip(found, torch.autograd.grad(expected, wide, dy.double()), strict=True):
        close(one, other)
    direct = softmax_backward(dy.movedim(1, -1).contiguous().movedim(-1, 1), y.detach(), dim=1, mask=mask.detach())
    assert all(torch.equal(one, other) for one, other in zip(direct, found, strict=True))


def test_statistics_have_no_gradient_and_the_leading_dimensions():
    y, lse = softmax(along(0), dim=0, return_lse=True)
    assert lse.shape == SHAPE[1:] and not lse.requires_grad and y.requires_grad


def test_a_second_gradient_is_refused_as_without_views():
    x = along(1)
    (dx,) = torch.autograd.grad(softmax(x, dim=1).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="softmax has no second derivative"):
        dx.sum().backward()


def test_an_output_of_the_caller_is_written_and_returned():
    x = along(1).detach()
    out = torch.zeros(2, 3, 7, 8)[..., :5].movedim(-1, 1)
    version = out._version
    assert softmax(x, dim=1, out=out) is out and torch.equal(out, softmax(x, dim=1)) and out._version > version
    with pytest.raises(ArgumentError, match=r"^softmax: out .*requires grad|^softmax: .*in place"):
        softmax(along(1), dim=1, out=out)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax(torch.ones(2, 3, 4), dim=1),
         r"dim=1: its elements are not next to each other in x, whose strides are \(12, 4, 1\): pass "
         r"x\.movedim\(1, -1\)\.contiguous\(\), other arrays alike, and move the result back$"),
        (lambda: softmax(torch.ones(3, 4).to_sparse_csr(), dim=0), "dim=0: an array has no such view: "),
        (lambda: softmax(torch.ones(3, 4).to_sparse(), dim=0), "dim=0: "),
        (lambda: softmax(torch.ones(3, 4), dim=torch.tensor(1.0)), "dim must be an integer from -2 to 1, .*tensor"),
        (lambda: softmax(torch.Tensor, dim=0), "x must be an array of torch, "),
    ],
)  # fmt: skip
def test_what_no_view_of_a_tensor_gives_is_refused(call, message):
    with pytest.raises(ArgumentError, match=f"^softmax: {message}"):
        call()


def test_the_way_that_a_message_tells_is_right():
    x = leaf(2, 3, 4)
    y = softmax(x.movedim(1, -1).contiguous()).movedim(-1, 1)
    close(y, torch.softmax(x.double(), 1))


# ---- Traces and transforms -------------------------------------------------------------------------------------------


def results(call, *leaves):
    found = call(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(1)
    with_gradients = [one for one in found if one.requires_grad]
    return [*found, *torch.autograd.grad(with_gradients, leaves, [torch.randn_like(one) for one in with_gradients])]


CALLS = {
    "softmax": (lambda x: softmax(x * 2, dim=1), lambda: (along(1),)),
    "a mask": (lambda x, m: softmax(x, dim=-3, mask=m, return_lse=True), lambda: (along(1), along(1))),
    "the last one": (lambda x: softmax(x, dim=3), lambda: (leaf(*SHAPE),)),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_has_the_bits_of_the_eager_one(name, dynamic):
    call, leaves = CALLS[name]
    given = leaves()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for found, expected in zip(results(compiled, *given), results(call, *given), strict=True):
        assert found.shape == expected.shape and torch.equal(found, expected)


def test_an_exported_program_has_the_views():
    class Module(torch.nn.Module):
        def forward(self, x):
            return softmax(x, dim=1)

    x = along(1).detach()
    program = torch.export.export(Module(), (x,))
    assert torch.equal(program.module()(x), softmax(x, dim=1))
    assert "transformer_rtc.softmax" in str(program.graph)


def test_a_batch_is_one_call_or_many_and_is_right():
    x = along(1).detach()
    assert torch.equal(torch.vmap(lambda one: softmax(one, dim=0))(x), softmax(x, dim=1))
    assert torch.equal(torch.vmap(lambda one: softmax(one, dim=1), in_dims=2, out_dims=2)(x), softmax(x, dim=1))
