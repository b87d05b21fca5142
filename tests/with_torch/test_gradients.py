# SPDX-License-Identifier: Apache-2.0
"""Gradients that autograd records: they are those of the backward operators, and what has none is refused."""

from __future__ import annotations

import itertools

import kernel_cache
import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, operator, select, using
from transformer_rtc.declaration import declarations
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
F = torch.nn.functional

FORWARD = [name for name, declaration in declarations().items() if declaration.gradient]
NORMS = [name for name in FORWARD if "norm" in name]
SOFTMAX = [name for name in FORWARD if "softmax" in name]
EPS = 1e-5


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    torch.manual_seed(11)
    with using("simulator"):
        yield


def leaf(*shape: int, dtype=torch.float32, grad: bool = True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def close(found, expected, bound: float) -> None:
    assert found.shape == expected.shape and found.isfinite().all()
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max().clamp(min=1)


def in_float64(name: str, given: dict):
    """Return what a norm computes, of tensors of float64 that are leaves of their own."""
    x, weight, bias = (given.get(key) for key in ("x", "weight", "bias"))
    if name.startswith("add_"):
        x = x + given["residual"]
    centred = x - x.mean(-1, keepdim=True) if "layer" in name else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y, x) if name.startswith("add_") else (y + given["residual"] if name.endswith("_add") else y,)


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 64), (17,), (3, 4, 130)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_are_those_of_float64(name, shape):
    heads = shape[-2:] if len(shape) > 2 else shape[-1:]
    given = {"x": leaf(*shape), "weight": leaf(*heads), "bias": leaf(*heads)}
    if "add" in name:
        given["residual"] = leaf(*shape)
    found = getattr(transformer_rtc, name)(**given, eps=EPS)
    found = found if isinstance(found, tuple) else (found,)
    exact = {key: value.detach().double().requires_grad_() for key, value in given.items()}
    expected = in_float64(name, exact)
    weights = [torch.randn(shape) for _ in found]
    sum((one * w).sum() for one, w in zip(found, weights, strict=True)).backward()
    sum((one * w).sum() for one, w in zip(expected, weights, strict=True)).backward()
    for key, value in given.items():
        # 16 roundings of float32 in sums of so few, of numbers whose largest is about 1.
        close(value.grad, exact[key].grad, 2.0**-20)


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("causal", [None, "aligned"])
def test_gradients_of_softmax_are_those_of_float64(name, causal):
    x, mask, sink = leaf(2, 3, 5, 9), leaf(3, 1, 9), leaf(3)
    given, exact = (x, mask, sink), [one.detach().double().requires_grad_() for one in (x, mask, sink)]
    y = getattr(transformer_rtc, name)(x, mask=mask, sink=sink, causal=causal, scale=0.5)
    logits = 0.5 * exact[0] + exact[1]
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4 if causal else 9)
    logits = logits.masked_fill(~seen, -torch.inf)
    sinks = exact[2].view(3, 1, 1).expand(2, 3, 5, 1)
    expected = logits - torch.logsumexp(torch.cat([logits, sinks], -1), -1, keepdim=True)
    expected = expected if name.startswith("log") else expected.exp()
    w = torch.randn(y.shape)
    (y * w)[..., seen].sum().backward()
    (expected * w)[..., seen].sum().backward()
    for one, of in zip(given, exact, strict=True):
        close(one.grad, of.grad, 2.0**-19)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_what_needs_no_gradient_has_none_and_the_others_the_bits_of_the_operator(name, dtype, monkeypatch):
    asked = []  # for plans of a size that no other test has
    backward = getattr(transformer_rtc, f"{name}_backward")
    original = operator.Operator._request
    monkeypatch.setattr(operator.Operator, "_request", lambda self, *a: asked.append(original(self, *a)) or asked[-1])
    dy = torch.randn(6, 52).to(dtype)
    for needs in itertools.product((True, False), repeat=3):
        if not any(needs):
            continue
        x, weight, bias = (leaf(*shape, dtype=dtype, grad=grad)
                           for shape, grad in zip(((6, 52), (52,), (52,)), needs, strict=True))  # fmt: skip
        y = getattr(transformer_rtc, name)(x, weight, bias=bias, eps=EPS)
        y.backward(dy)
        types = next(one.dtypes for one in asked if one.operator == f"{name}_backward")
        with torch.no_grad():
            flags = {"return_dx": needs[0], "return_dweight": needs[1], "return_dbias": needs[2]}
            wanted = {"return_rstd": True} | ({"return_mean": True} if name == "layer_norm" else {})
            _, *statistics = getattr(transformer_rtc, name)(x, weight, bias=bias, eps=EPS, **wanted)
            named = dict(zip(("mean", "rstd")[-len(statistics) :], statistics, strict=True))
            expected = backward(dy, x, weight, EPS, **named, **flags)
        expected = iter(expected if isinstance(expected, tuple) else (expected,))
        for one, need in zip((x, weight, bias), needs, strict=True):
            assert (one.grad is not None) == need
            assert not need or (one.grad.dtype == dtype and torch.equal(one.grad, next(expected)))
        assert [types[key] is not None for key in ("out", "dweight", "dbias")] == list(needs)
        asked.clear()


def test_gradients_have_the_types_of_what_they_are_of():
    x, residual = leaf(4, 32, dtype=torch.bfloat16), leaf(4, 32)
    weight, bias = leaf(32), leaf(32, dtype=torch.float16)
    y, s = transformer_rtc.add_layer_norm(x, residual, weight, bias)
    (y.sum() + s.sum()).backward()
    for one in (x, residual, weight, bias):
        assert one.grad.dtype == one.dtype and one.grad.isfinite().all()
    assert (bias.grad == 4).all()
    alone = leaf(32)
    transformer_rtc.rms_norm(leaf(4, 32, dtype=torch.bfloat16, grad=False), bias=alone).sum().backward()
    assert alone.grad.dtype == torch.float32 and (alone.grad == 4).all()


FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("used", ["both", "y", "s"])
@pytest.mark.parametrize(
    ("name", "x", "residual", "s"),
    [
        ("add_rms_norm", BFLOAT16, BFLOAT16, FLOAT32),
        ("add_layer_norm", FLOAT16, FLOAT16, "float32"),
        ("add_layer_norm", BFLOAT16, FLOAT32, FLOAT32),
        ("add_rms_norm", FLOAT16, BFLOAT16, FLOAT32),
        ("add_rms_norm", FLOAT32, FLOAT32, "bfloat16"),
    ],
)
def test_gradients_beside_a_sum_of_another_type_are_those_of_float64_rounded_once(name, x, residual, s, used):
    shape, types = (6, 72), (x, residual)
    given = {"x": leaf(*shape, dtype=x), "residual": leaf(*shape, dtype=residual), "weight": leaf(72), "bias": leaf(72)}
    y, total = getattr(transformer_rtc, name)(**given, eps=EPS, residual_dtype=s)
    s = getattr(torch, s) if isinstance(s, str) else s
    assert (y.dtype, total.dtype) == (x, s)
    assert torch.equal(total, (given["x"].float() + given["residual"].float()).to(s))
    exact = {key: value.detach().double().requires_grad_() for key, value in given.items()}
    # The rounding of s has no gradient: what is normalized is what was stored.
    exact["x"] = (total.detach().double() - exact["residual"].detach()).requires_grad_()
    expected = in_float64(name, exact)
    dy, ds = torch.randn(shape).to(y.dtype), torch.randn(shape).to(s)
    pairs = ((y, expected[0], dy), (total, expected[1], ds))
    pairs = [pair for pair, one in zip(pairs, "ys", strict=True) if used in ("both", one)]
    sum((of.double() * d).sum() for _, of, d in pairs).backward()
    torch.autograd.backward([found for found, _, _ in pairs], [d for _, _, d in pairs])
    for key, value in given.items():
        if used == "s" and key in ("weight", "bias"):
            assert value.grad is None
            continue
        assert value.grad.dtype == value.dtype
        # Half an ulp of the type, beside what float32 loses. Gradients of several types are rounded once each.
        wrong = (value.grad.double() - exact[key].grad).abs()
        half = torch.finfo(value.dtype).eps / 2 if key in ("x", "residual") else 0
        assert (wrong <= exact[key].grad.abs() * half * 1.01 + 2.0**-19 * exact[key].grad.abs().max()).all(), key
    if types[0] == types[1]:
        assert torch.equal(given["x"].grad, given["residual"].grad)


def test_a_float32_residual_goes_on_through_layers_of_16_bits():
    h, weight = leaf(5, 64, dtype=BFLOAT16), leaf(64)
    residual, stream = leaf(5, 64, dtype=BFLOAT16), []
    y, s = transformer_rtc.add_rms_norm(h, residual, weight, residual_dtype=FLOAT32)
    for _ in range(3):
        y, s = transformer_rtc.add_rms_norm(y * 0.5, s, weight)
        s.retain_grad()
        stream.append(s)
        assert (y.dtype, s.dtype) == (BFLOAT16, FLOAT32)
    (y.float().square().sum() + s.square().sum()).backward()
    assert all(one.grad.dtype == FLOAT32 and one.grad.isfinite().all() for one in stream)
    assert h.grad.dtype == residual.grad.dtype == BFLOAT16 and torch.equal(h.grad, residual.grad)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_a_product_rounded_before_the_weight_has_the_bits_of_two_steps_and_the_gradient_of_one(name):
    given = {"x": leaf(6, 72, dtype=BFLOAT16), "weight": leaf(72, dtype=BFLOAT16)}
    if "add" in name:
        given["residual"] = leaf(6, 72, dtype=BFLOAT16)
    y, *s, rstd = getattr(transformer_rtc, name)(**given, return_rstd=True, round_before_weight=True)
    x = s[0] if s else given["x"]
    # As Hugging Face's modules have it.
    normal = (x.float() * rstd[:, None]).to(BFLOAT16)
    assert torch.equal(y, given["weight"] * normal)
    dy = torch.randn(6, 72).to(BFLOAT16)
    found = torch.autograd.grad(y, list(given.values()), dy)
    once, *_ = getattr(transformer_rtc, name)(**given, return_rstd=True)
    assert not torch.equal(once, y)
    for one, other in zip(found, torch.autograd.grad(once, list(given.values()), dy), strict=True):
        assert torch.equal(one, other)


def test_either_output_of_a_fused_add_may_be_used_alone():
    x, residual, weight = leaf(4, 32), leaf(4, 32), leaf(32)
    y, s = transformer_rtc.add_rms_norm(x, residual, weight)
    assert y.requires_grad and s.requires_grad
    (s * 3).sum().backward()
    assert (x.grad == 3).all() and (residual.grad == 3).all() and weight.grad is None
    y, s = transformer_rtc.add_rms_norm(x, residual, weight)
    y.sum().backward()
    assert weight.grad is not None
    normalized = leaf(4, 32)
    transformer_rtc.rms_norm_add(normalized, residual.detach().requires_grad_(), weight).sum().backward()
    assert normalized.grad is not None


@pytest.mark.parametrize("rows", [0, 1])
def test_rows_may_be_none_and_dy_of_any_strides(rows):
    # Not of 40 columns, whose plans the test of what was asked for must be the first to make.
    x, weight = leaf(rows, 32), leaf(32)
    transformer_rtc.rms_norm(x, weight).sum().backward()  # of strides 0
    assert x.grad.shape == x.shape and (rows or (weight.grad == 0).all())
    turned, w = leaf(32, 6), leaf(32)
    transformer_rtc.rms_norm(turned.T.contiguous(), w).T.matmul(torch.randn(6, 3)).sum().backward()
    assert turned.grad.isfinite().all()


def test_statistics_have_no_gradient_and_y_has():
    y, mean, rstd = transformer_rtc.layer_norm(leaf(4, 32), leaf(32), return_mean=True, return_rstd=True)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad
    y, lse = transformer_rtc.softmax(leaf(4, 32), return_lse=True)
    assert y.requires_grad and not lse.requires_grad


X, W = (4, 32), (32,)
REFUSED = [
    ("rms_norm", {"out": torch.empty(X)}, "out is written in place, which records no gradient, and x requires grad"),
    ("add_rms_norm", {"residual_out": torch.empty(X)}, "residual_out is written in place.* and x requires grad"),
    ("rms_norm", {"out_dtype": "float8_e4m3fn"}, "an output of float8_e4m3fn has no gradient, and x requires grad"),
    ("rms_norm", {"out_dtype": torch.int8, "row_scaling": True}, "an output of torch.int8 has no gradient"),
    ("rms_norm", {"weight_offset": torch.ones((), requires_grad=True)}, "weight_offset is a tensor that requires grad"),
    ("softmax", {"scale": torch.ones((), requires_grad=True)}, "scale is a tensor that requires grad"),
    ("rms_norm", {"stream": 5}, "stream records no gradient, and x requires grad"),
    ("rms_norm", {"eps": torch.ones((), requires_grad=True)}, "eps is a tensor that requires grad, and"),
    ("rms_norm", {"bias": torch.ones(X, requires_grad=True)}, "bias of each head has a gradient only beside weight"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_has_no_gradient_is_refused(name, given, message):
    first = {"x": leaf(*X), **({"residual": leaf(*X)} if "add" in name else {})}
    with pytest.raises(ArgumentError, match=f"^{name}: {message}"):
        getattr(transformer_rtc, name)(**first, **given)


def test_a_number_whose_gradient_would_be_lost_is_refused_while_grad_mode_is_on():
    one = torch.ones((), requires_grad=True)
    for name, given in (("rms_norm", {"weight_offset": one}), ("softmax", {"scale": one})):
        with pytest.raises(ArgumentError, match=f"^{name}: .* is a tensor that requires grad.* pass its .item"):
            getattr(transformer_rtc, name)(torch.ones(X), **given)
        with torch.no_grad():
            assert getattr(transformer_rtc, name)(torch.ones(X), **given).shape == X
        assert getattr(transformer_rtc, name)(torch.ones(X), **{key: one.detach() for key in given}).shape == X


def test_what_is_written_may_not_require_grad_alone():
    out = torch.empty(X, requires_grad=True)
    for name in ("rms_norm", "softmax"):
        with pytest.raises(ArgumentError, match=f"^{name}: out is written in place, .* and out requires grad"):
            getattr(transformer_rtc, name)(torch.ones(X), out=out)


def test_a_second_derivative_is_refused_where_it_is_asked_for():
    x, weight = leaf(4, 32), leaf(32)
    (dx,) = torch.autograd.grad(transformer_rtc.rms_norm(x, weight).sum(), x, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(RuntimeError, match="rms_norm has no second derivative"):
        dx.square().sum().backward()
    with pytest.raises(ArgumentError, match=r"^rms_norm_backward: x requires grad, and this operator records no"):
        transformer_rtc.rms_norm_backward(torch.randn(4, 32), x)


@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_a_second_derivative_is_never_zero_without_a_word(name):
    x, dy = leaf(4, 32), leaf(4, 32)
    call = getattr(transformer_rtc, name)
    (dx,) = torch.autograd.grad(call(x), x, dy, create_graph=True)
    # torch takes for zero what a gradient does not lead to.
    for of in (x, dy):
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
            torch.autograd.grad(dx.sum(), of, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
        torch.autograd.functional.hessian(lambda x: call(x).square().sum(), x.detach())


def test_what_was_saved_and_is_overwritten_is_told():
    x, weight = leaf(4, 32), leaf(32)
    y = transformer_rtc.rms_norm(x, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = transformer_rtc.softmax(leaf(4, 32))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


OVERWRITES = {
    "rms_norm": lambda h, w: transformer_rtc.rms_norm(h, w, out=h),
    "add_rms_norm": lambda h, w: transformer_rtc.add_rms_norm(
        torch.ones_like(h), torch.ones_like(h), w, residual_out=h
    ),
    "softmax": lambda h, w: transformer_rtc.softmax(torch.ones_like(h), out=h),
    "layer_norm": lambda h, w: transformer_rtc.layer_norm(
        torch.ones_like(h), w, amax=h.view(-1)[:1], out_dtype="float8_e4m3fn"
    ),
}


@pytest.mark.parametrize("name", OVERWRITES)
def test_what_autograd_saved_and_an_output_overwrites_is_told(name):
    x, weight = leaf(4, 32), leaf(32)
    h = x * 1
    y = h.square().sum() + transformer_rtc.rms_norm(h, weight).sum()  # both save h
    before = h._version
    with torch.no_grad():
        OVERWRITES[name](h, weight)
    assert h._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        transformer_rtc.rms_norm(torch.ones(4, 32), out=torch.empty(4, 32))


def test_the_backward_runs_as_the_forward_did(monkeypatch):
    x, chosen = leaf(4, 52), SimulatedDevice(static=True, seed=5)
    with using(chosen):
        y = transformer_rtc.rms_norm(x)
        number = select.chosen.get()
    seen, original = [], select.device_for
    monkeypatch.setattr(select, "device_for", lambda of, *others: seen.append(of) or original(of, *others))
    before = select.chosen.get()
    y.sum().backward()
    assert select.chosen.get() == before != number and set(seen) == {number}


def test_nodes_have_the_operators_names():
    assert transformer_rtc.rms_norm(leaf(4, 32)).grad_fn.name() == "rms_normBackward"


def test_an_output_that_needs_nothing_requires_nothing():
    x, residual, weight = leaf(4, 32, grad=False), leaf(4, 32, grad=False), leaf(32)
    y, s = transformer_rtc.add_rms_norm(x, residual, weight)
    assert y.requires_grad and not s.requires_grad
    y = transformer_rtc.rms_norm_add(x, residual.requires_grad_())
    assert not y.grad_fn.saved_tensors
    y.sum().backward()
    assert (residual.grad == 1).all()


def test_a_number_is_what_it_was_at_the_forward():
    offset, x = torch.tensor(1.0), leaf(4, 32)
    y = transformer_rtc.rms_norm(x, leaf(32, grad=False).fill_(1), weight_offset=offset)
    offset.fill_(100.0)
    y.sum().backward()
    again = x.detach().clone().requires_grad_()
    transformer_rtc.rms_norm(again, torch.ones(32), weight_offset=1.0).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_without_grad_mode_nothing_is_recorded():
    x = leaf(4, 32)
    with torch.no_grad():
        assert not transformer_rtc.rms_norm(x).requires_grad
    with torch.inference_mode():
        assert not transformer_rtc.rms_norm(x).requires_grad
    assert not transformer_rtc.rms_norm(x.detach()).requires_grad
    assert transformer_rtc.rms_norm(torch.randn(4, 32), x[0]).requires_grad
