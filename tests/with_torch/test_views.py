# SPDX-License-Identifier: Apache-2.0
"""Softmax along any dimension and norms over several, of tensors: gradients, traces and transforms of the views."""

from __future__ import annotations

import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, layer_norm, log_softmax, rms_norm, softmax, softmax_backward, using
from transformer_rtc.declaration import declarations
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
F = torch.nn.functional

SHAPE = (2, 5, 3, 7)
FORWARD = [name for name, declaration in declarations().items() if declaration.gradient]
NORMS = [name for name in FORWARD if "norm" in name]


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


def in_float64(name: str, given: dict, count: int):
    """Return what a norm computes by torch, of tensors of float64 that are leaves of their own."""
    given = {key: one.detach().double().requires_grad_() for key, one in given.items()}
    x, shape = given["x"], given["x"].shape[-count:]
    x = x + given["residual"] if name.startswith("add_") else x
    if "layer" in name:
        y = F.layer_norm(x, shape, given["weight"], given["bias"])
    else:
        y = F.rms_norm(x, shape, given["weight"], 1e-6) + given["bias"]
    return given, (y, x) if name.startswith("add_") else (y + given["residual"] if name.endswith("_add") else y,)


@pytest.mark.parametrize(
    ("shape", "count"), [((3, 4, 10), 2), ((2, 3, 2, 1, 9), 3), ((6, 5), 2), ((3, 4, 10), 1)], ids=str
)
@pytest.mark.parametrize("name", NORMS)
def test_norms_over_several_dimensions_and_their_gradients_are_torchs(name, shape, count):
    given = {"x": leaf(*shape), "weight": leaf(*shape[-count:]), "bias": leaf(*shape[-count:])}
    if "add" in name:
        given["residual"] = leaf(*shape)
    wide, expected = in_float64(name, given, count)
    found = getattr(transformer_rtc, name)(**given, normalized_shape=torch.Size(shape[-count:]))
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    dys = [torch.randn_like(one) for one in found]
    gradients = torch.autograd.grad(found, tuple(given.values()), dys)
    exact = torch.autograd.grad(expected, tuple(wide.values()), [one.double() for one in dys])
    for one, other in zip(gradients, exact, strict=True):
        close(one, other, 1e-4)


def test_statistics_have_no_gradient_and_the_leading_dimensions():
    x = leaf(3, 2, 4, 6)
    y, mean, rstd = layer_norm(x, normalized_shape=(4, 6), return_mean=True, return_rstd=True)
    assert mean.shape == rstd.shape == (3, 2) and not mean.requires_grad and y.requires_grad
    y, lse = softmax(along(0), dim=0, return_lse=True)
    assert lse.shape == SHAPE[1:] and not lse.requires_grad and y.requires_grad


def test_a_second_gradient_is_refused_as_without_views():
    x = along(1)
    (dx,) = torch.autograd.grad(softmax(x, dim=1).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="softmax has no second derivative"):
        dx.sum().backward()
    x = leaf(3, 4, 5)
    (dx,) = torch.autograd.grad(rms_norm(x, normalized_shape=(4, 5)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm has no second derivative"):
        dx.sum().backward()


def test_an_output_of_the_caller_is_written_and_returned():
    x = along(1).detach()
    out = torch.zeros(2, 3, 7, 8)[..., :5].movedim(-1, 1)
    version = out._version
    assert softmax(x, dim=1, out=out) is out and torch.equal(out, softmax(x, dim=1)) and out._version > version
    rows, total = torch.randn(3, 4, 5), torch.zeros(3, 4, 5)
    assert rms_norm(rows, normalized_shape=(4, 5), out=total) is total
    assert torch.equal(total.flatten(1), rms_norm(rows.flatten(1)))
    with pytest.raises(ArgumentError, match=r"^softmax: out .*requires grad|^softmax: .*in place"):
        softmax(along(1), dim=1, out=out)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax(torch.ones(2, 3, 4), dim=1),
         r"dim=1: its elements are not next to each other in x, whose strides are \(12, 4, 1\) elements: "
         r"call softmax\(x\.movedim\(1, -1\)\.contiguous\(\)\)\.movedim\(-1, 1\), without dim$"),
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
    with pytest.raises(ArgumentError, match=r"pass x\.contiguous\(\)$"):
        layer_norm(x.transpose(1, 2), normalized_shape=(4, 3))
    y = layer_norm(x.transpose(1, 2).contiguous(), normalized_shape=(4, 3))
    close(y, F.layer_norm(x.transpose(1, 2).double(), (4, 3)))
    y = softmax(x.movedim(1, -1).contiguous()).movedim(-1, 1)
    close(y, torch.softmax(x.double(), 1))


def test_patch_swaps_norms_over_several_dimensions():
    model = torch.nn.Sequential(torch.nn.LayerNorm((3, 7)), torch.nn.RMSNorm((3, 7), eps=1e-5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    state, x = model.state_dict(), torch.randn(SHAPE)
    expected = model.double()(x.double())
    assert len(transformer_rtc.torch.patch(model.float()).swapped) == 2
    close(model(x), expected)
    close(model(x.transpose(0, 1)), expected.transpose(0, 1))  # of other strides, and
    close(model(x.movedim(-1, 0).contiguous().movedim(0, -1)), expected)  # copied where no view gives rows
    torch.nn.Sequential(torch.nn.LayerNorm((3, 7)), torch.nn.RMSNorm((3, 7))).load_state_dict(state)


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
    "several": (lambda x, w: rms_norm(x, w, normalized_shape=(3, 7), return_rstd=True),
                lambda: (leaf(*SHAPE), leaf(3, 7))),
    "a shape of x": (lambda x: layer_norm(x, normalized_shape=x.shape[-2:]), lambda: (leaf(*SHAPE),)),
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
    rows, weight = torch.randn(SHAPE), torch.randn(3, 7)
    expected = rms_norm(rows, weight, normalized_shape=(3, 7))
    for dim in (0, 1):
        found = torch.vmap(lambda one: rms_norm(one, weight, normalized_shape=(3, 7)), dim, dim)(rows)
        assert torch.equal(found, expected)
    # A gradient for each example, of the weight, too.
    leaves = torch.randn(4, 3, 7), torch.randn(3, 7)
    loss = lambda one, w: rms_norm(one, w, normalized_shape=(3, 7)).square().sum()  # noqa: E731
    found = torch.vmap(torch.func.grad(loss, (0, 1)), (0, None))(*leaves)
    for number in range(4):
        wide = [one.double().requires_grad_() for one in (leaves[0][number], leaves[1])]
        exact = torch.autograd.grad(F.rms_norm(wide[0], (3, 7), wide[1], 1e-6).square().sum(), wide)
        for one, other in zip(found, exact, strict=True):
            close(one[number], other, 1e-4)
