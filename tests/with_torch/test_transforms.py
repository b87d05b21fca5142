"""The operators under torch.func: each example has the bits of its own call."""

from __future__ import annotations

import kernel_cache
import pytest

import transformer_rtc
from transformer_rtc import operator, using
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap  # noqa: E402

from transformer_rtc import (  # noqa: E402
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    log_softmax,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
)

BATCH, ROWS, HIDDEN = 3, 5, 40


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    with using("simulator"):
        yield


@pytest.fixture
def launches(monkeypatch):
    """Return the native calls that operators of torch made: an eager call is none."""
    made = []
    for name, declaration in transformer_rtc.declaration.declarations().items():
        native = operator.operator_of(name)
        assert native.declaration is declaration

        def counted(*values, call=native.direct):
            made.append(values)
            return call(*values)

        monkeypatch.setattr(native, "direct", counted)
    return made


def examples(call, arguments, in_dims):
    """Return what the calls of all examples return, one after the other."""
    found = []
    for number in range(BATCH):
        own = (one if dim is None else one.select(dim, number) for one, dim in zip(arguments, in_dims, strict=True))
        made = call(*own)
        found.append(made if isinstance(made, tuple) else (made,))
    return [torch.stack(each) for each in zip(*found, strict=True)]


def check(call, arguments, in_dims):
    found = vmap(call, in_dims=in_dims)(*arguments)
    expected = examples(call, arguments, in_dims)
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


x, weight = torch.randn(BATCH, ROWS, HIDDEN), torch.rand(HIDDEN)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_of_all_examples_are_one_launch(launches, dim):
    moved = x.movedim(0, dim)
    check(lambda x: rms_norm(x, weight, return_rstd=True), (moved,), (dim,))
    assert len(launches) == 1


def test_rows_that_are_not_in_the_batch_are_every_example_s(launches):
    residual = torch.randn(ROWS, HIDDEN)
    check(lambda x, residual: add_rms_norm(x, residual, weight), (x, residual), (0, None))
    check(lambda x, residual: add_rms_norm(residual, x, weight), (x, residual), (0, None))
    assert len(launches) == 2


def test_weights_of_their_own_are_a_loop(launches):
    weights = torch.rand(BATCH, HIDDEN)
    check(lambda x, weight: layer_norm(x, weight), (x, weights), (0, 0))
    check(lambda weight: layer_norm(x[0], weight), (weights,), (0,))
    assert len(launches) == 2 * BATCH


def test_a_weight_of_each_head_stays_with_its_head(launches):
    of_heads = torch.rand(ROWS, HIDDEN)
    check(lambda x: rms_norm(x, of_heads), (x,), (0,))
    assert len(launches) == 1
    # Rows without heads have no such weight, though the batch has as many.
    with pytest.raises(ArgumentError, match="weight must have the shape"):
        weights = torch.rand(BATCH, HIDDEN)
        vmap(lambda x: rms_norm(x, weights))(x[:, 0])


@pytest.mark.parametrize("shape", [(7,), (6, 7), (2, 6, 7), (2, 2, 6, 7)], ids=str)
def test_scores_of_any_number_of_dimensions(launches, shape):
    scores = torch.randn(BATCH, *shape)
    check(lambda x: log_softmax(x, scale=0.5, return_lse=True), (scores,), (0,))
    if len(shape) > 1:
        check(lambda x: softmax(x, causal="aligned", window=3), (scores,), (0,))
        mask = torch.rand(BATCH, 6, 7) < 0.3
        check(lambda x, mask: softmax(x, mask=mask), (scores, mask[0]), (0, None))
        check(lambda x, mask: softmax(x, mask=mask), (scores, mask), (0, 0))
        check(lambda mask: softmax(scores[0], mask=mask), (mask,), (0,))
    assert len(launches) == (5 if len(shape) > 1 else 1)


def test_a_mask_of_each_batch_and_head(launches):
    scores = torch.randn(BATCH, 2, 2, 6, 7)
    for shape in ((2, 1, 6, 7), (2, 2, 1, 7), (1, 2, 6, 7)):
        mask = torch.rand(BATCH, *shape) < 0.3
        check(lambda x, mask: softmax(x, mask=mask), (scores, mask), (0, 0))
        check(lambda x, mask: softmax(x, mask=mask), (scores, mask[0]), (0, None))
    sink = torch.randn(2)
    check(lambda x: softmax(x, sink=sink), (scores,), (0,))
    assert len(launches) == 7


def test_a_sink_belongs_to_a_head_that_an_example_has():
    sink = torch.randn(BATCH)
    with pytest.raises(ArgumentError, match="sink must have one element for each head"):
        vmap(lambda x: softmax(x, sink=sink))(torch.randn(BATCH, 6, 7))


def test_gradients_that_sum_over_rows_are_each_example_s(launches):
    dy = torch.randn_like(x)
    check(lambda dy, x: rms_norm_backward(dy, x, weight, return_dweight=False), (dy, x), (0, 0))
    assert len(launches) == 1
    check(lambda dy, x: layer_norm_backward(dy, x, weight), (dy, x), (0, 0))
    assert len(launches) == 1 + BATCH
    y, mask = softmax(torch.randn(BATCH, 2, 6, 7)), torch.randn(6, 7)
    check(lambda dy, y: softmax_backward(dy, y, mask=mask, return_dmask=True), (torch.randn_like(y), y), (0, 0))


def test_what_is_updated_is_each_example_s():
    scale, amax = torch.full((1,), 2.0), torch.zeros(BATCH, 1)

    def call(x, amax):
        return rms_norm(x, weight, out_dtype=torch.float8_e4m3fn, scale=scale, amax=amax).float()

    seen = amax.clone()
    expected = torch.stack([call(one, each) for one, each in zip(x, seen, strict=True)])
    assert vmap(call)(x, amax).equal(expected) and amax.equal(seen)


def loss(weight, x):
    y, s = add_rms_norm(x, x * 2, weight)
    return (y.square() * 0.5 + s).sum()


@pytest.mark.parametrize("transform", ["grad", "vjp", "autograd"])
def test_a_gradient_is_autograd_s(transform):
    leaves = weight.clone().requires_grad_(), x[0].clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    if transform == "grad":
        found = grad(loss, (0, 1))(weight, x[0])
    elif transform == "vjp":
        found = vjp(loss, weight, x[0])[1](torch.ones(()))
    else:
        found = torch.autograd.grad(torch.func.vmap(lambda x: loss(leaves[0], x))(leaves[1][None])[0], leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_gradients_of_each_example():
    found = vmap(grad(loss, (0, 1)), in_dims=(None, 0))(weight, x)
    each = [grad(loss, (0, 1))(weight, one) for one in x]
    for one, others in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others), rtol=1e-6, atol=1e-6)


def test_transforms_of_transforms():
    both = torch.randn(2, *x.shape)
    assert vmap(vmap(lambda x: rms_norm(x, weight)))(both).equal(rms_norm(both, weight))
    assert vmap(vmap(lambda x: rms_norm(x, weight), in_dims=1), in_dims=3)(both.movedim(0, 3).contiguous()).shape == (
        2, ROWS, BATCH, HIDDEN,
    )  # fmt: skip
    assert vmap(lambda x: rms_norm(x, weight), chunk_size=2, out_dims=1)(x).equal(rms_norm(x, weight).movedim(0, 1))
    of_all = grad(lambda x: vmap(lambda x: rms_norm(x, weight))(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    assert of_all.equal(torch.autograd.grad(rms_norm(leaf, weight).square().sum(), leaf)[0])
    row = torch.randn(1, HIDDEN)
    found = jacrev(lambda x: rms_norm(x, weight))(row)
    expected = jacrev(lambda x: torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-6))(row)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_may_be_batched():
    leaf = x[0].clone().requires_grad_()
    y, dy = rms_norm(leaf, weight), torch.randn(BATCH, ROWS, HIDDEN)
    (found,) = torch.autograd.grad(y, leaf, dy, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, leaf, one, retain_graph=True)[0] for one in dy]
    assert found.equal(torch.stack(expected))
    jacobian = torch.autograd.functional.jacobian
    row = torch.randn(1, HIDDEN)
    assert jacobian(rms_norm, row, vectorize=True).equal(jacobian(rms_norm, row))


def test_a_module_is_a_function_of_its_parameters():
    norm = transformer_rtc.torch.LayerNorm(HIDDEN)
    others = {name: torch.rand(BATCH, HIDDEN) for name in ("weight", "bias")}
    found = vmap(lambda parameters: functional_call(norm, parameters, (x[0],)))(others)
    expected = [layer_norm(x[0], *each, norm.eps) for each in zip(others["weight"], others["bias"], strict=True)]
    assert found.equal(torch.stack(expected))


def test_what_there_is_no_derivative_of_is_refused():
    for transform in (lambda: jvp(rms_norm, (x,), (x,)), lambda: torch.func.jacfwd(rms_norm)(x[0])):
        with pytest.raises(ArgumentError, match="rms_norm has no forward-mode derivative"):
            transform()
    with pytest.raises(RuntimeError, match=r"rms_norm_backward has no derivative.*second"):
        grad(lambda x: grad(lambda x: rms_norm(x).square().sum())(x).sum())(x[0])
