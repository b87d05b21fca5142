# SPDX-License-Identifier: Apache-2.0
"""Norms and softmax as modules: what torch's give in float64, with torch's constructors and state dicts."""

from __future__ import annotations

import copy

import kernel_cache
import pytest
from processes import output, shared

from transformer_rtc import operator, using
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
F = torch.nn.functional

from transformer_rtc.torch import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, Softmax  # noqa: E402

BF16 = torch.bfloat16
OF_TORCH = {RMSNorm: torch.nn.RMSNorm, LayerNorm: torch.nn.LayerNorm}


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    torch.manual_seed(23)
    with using("simulator"):
        yield


def close(found, expected, bound: float = 1e-5) -> None:
    assert found.shape == expected.shape and found.isfinite().all()
    if found.numel():
        assert (found.double() - expected.double()).abs().max() <= bound * expected.abs().max().clamp(min=1)


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


# ---- Torch's constructors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [8, (8,), [2, 4], torch.Size([2, 4])], ids=str)
@pytest.mark.parametrize("class_", OF_TORCH)
def test_constructors_and_state_dicts_are_those_of_torch(class_, shape):
    of_torch = OF_TORCH[class_]
    for arguments in ({}, {"elementwise_affine": False}, {"eps": 1e-3, "dtype": BF16}, {"device": "meta"}):
        ours, theirs = class_(shape, **arguments), of_torch(shape, **arguments)
        assert isinstance(ours, of_torch)
        names = ("normalized_shape", "eps", "elementwise_affine")
        assert all(getattr(ours, name) == getattr(theirs, name) for name in names)
        state = theirs.state_dict()
        assert list(ours.state_dict()) == list(state)
        for name, value in ours.state_dict().items():
            assert (value.shape, value.dtype, value.device) == (
                state[name].shape,
                state[name].dtype,
                state[name].device,
            )
            assert value.is_meta or torch.equal(value, state[name])
        ours.load_state_dict(state)
        assert str(ours) == str(theirs)
    assert LayerNorm(8, bias=False).bias is None


def test_a_weight_is_initialised_so_that_it_is_1_with_its_offset():
    for module in (
        RMSNorm(8, zero_centered_gamma=True),
        LayerNorm(8, weight_offset=1.0),
        AddRMSNorm(8, weight_offset=1),
    ):
        assert module.weight_offset == 1 and (module.weight == 0).all()
    on_meta = RMSNorm(8, device="meta", weight_offset=0.25, sequence_parallel=True).to_empty(device="cpu")
    on_meta.reset_parameters()
    assert (on_meta.weight == 0.75).all() and on_meta.weight.sequence_parallel
    assert not hasattr(RMSNorm(8).weight, "sequence_parallel")
    both = LayerNorm(8, sequence_parallel=True)
    assert both.weight.sequence_parallel and both.bias.sequence_parallel


def test_what_is_not_usual_is_shown():
    module = AddRMSNorm(8, eps=1e-5, weight_offset=1, rounding="twice", residual_dtype=torch.float32, sm_margin=2)
    assert str(module) == (
        "AddRMSNorm((8,), eps=1e-05, elementwise_affine=True, weight_offset=1.0, rounding='twice', "
        "residual_dtype=torch.float32, sm_margin=2)"
    )
    assert str(Softmax(-1, scale=0.5, out_dtype=BF16)) == "Softmax(dim=-1, scale=0.5, out_dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RMSNorm(8, rounding="thrice"), "rounding is 'thrice'; it takes once, twice"),
        (lambda: RMSNorm(8, sm_margin=-1), "sm_margin is -1; it takes an integer"),
        (lambda: LayerNorm(8, sm_margin=1.5), r"sm_margin is 1\.5"),
        (lambda: RMSNorm(8, out_dtype=torch.float64), r"out_dtype is torch\.float64; it takes torch\.bfloat16, "),
        (lambda: RMSNorm(8, weight_offset=2, zero_centered_gamma=True), "weight_offset is 2 beside"),
        (lambda: AddLayerNorm(8, residual_dtype=torch.int8), r"residual_dtype is torch\.int8"),
        (lambda: Softmax(scale=float("nan")), "scale is nan"),
        (lambda: RMSNorm((2, 4))(torch.ones(3, 8)), r"x has the shape \[3, 8\]; .* normalized_shape, \[2, 4\]"),
        (lambda: LayerNorm(8, elementwise_affine=False)(torch.ones(3, 7)), r"x has the shape \[3, 7\]"),
        (lambda: RMSNorm(8)(torch.ones(3, 7)), "weight must"),
        (lambda: Softmax(0)(torch.ones(3, 8), torch.zeros(3, 8)), "dim is 0; a mask"),
        (lambda: Softmax(-1)(torch.ones(3, 8).double(), causal="aligned"), "x"),
    ],
)
def test_what_is_not_accepted_is_told(make, told):
    with pytest.raises(ArgumentError, match=told):
        make()


# ---- Numbers ---------------------------------------------------------------------------------------------------------

# Of 48 elements in a row, or of rows of (2, 24): each with strides of another kind.
INPUTS = {
    "rows": lambda: torch.randn(3, 48),
    "one row": lambda: torch.randn(48),
    "no rows": lambda: torch.randn(0, 48),
    "columns of a transposed matrix": lambda: torch.randn(48, 5).T,
    "part of a packed qkv": lambda: torch.randn(2, 3, 144)[..., 48:96],
    "four dimensions in another order": lambda: torch.randn(2, 3, 4, 48).permute(2, 0, 1, 3),
    "one row for all": lambda: torch.randn(48).expand(2, 3, 48),
    "every second": lambda: torch.randn(3, 96)[:, ::2],
    "dimensions of 1": lambda: torch.randn(2, 1, 3, 1, 48).transpose(0, 2),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("class_", OF_TORCH)
def test_inputs_of_any_strides_have_the_values_and_gradients_of_float64(class_, name):
    given = INPUTS[name]()
    for shape in (48, (2, 24)):
        ours = randomised(class_(shape, eps=1e-5))
        theirs = copy.deepcopy(ours).double()
        theirs.__class__ = OF_TORCH[class_]
        x = (given if shape == 48 else given.unflatten(-1, shape)).detach().requires_grad_()
        expected_x = x.detach().double().requires_grad_()
        y, expected = ours(x), theirs(expected_x)
        close(y, expected)
        dy = torch.randn(y.shape)
        y.backward(dy)
        expected.backward(dy.double())
        close(x.grad, expected_x.grad)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(one.grad, other.grad)


@pytest.mark.parametrize("class_", OF_TORCH)
def test_a_weight_of_another_type_is_taken_and_y_has_the_type_of_x(class_):
    module = randomised(class_(48, 1e-5, weight_offset=1.0))
    x = torch.randn(4, 48).to(BF16)
    same = copy.deepcopy(module)
    with torch.no_grad():
        same.weight.add_(1)
    same.__class__ = OF_TORCH[class_]
    expected = same.double()(x.double())
    y = module(x)
    assert y.dtype == BF16
    close(y, expected, 2.0**-8)
    module.out_dtype = torch.float32
    y = module(x)
    assert y.dtype == torch.float32
    close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_without_eps_it_is_that_of_the_installed_torch(dtype):
    x = (torch.randn(4, 48) * 1e-3).to(dtype)
    close(RMSNorm(48)(x), torch.nn.RMSNorm(48, dtype=dtype)(x), 1e-2)


def hugging_face(x, weight, eps):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_rounded_twice_has_the_bits_of_hugging_face(add, weight_dtype):
    class_ = AddRMSNorm if add else RMSNorm
    module = randomised(class_(48, 1e-6, dtype=weight_dtype, rounding="twice"))
    x = torch.randn(256, 48).to(BF16)
    given = (x, torch.zeros_like(x)) if add else (x,)
    expected = hugging_face(x, module.weight, 1e-6).to(BF16)

    def differ() -> float:
        y = module(*given)[0] if add else module(*given)
        assert y.dtype == BF16
        return float((y != expected).double().mean())

    # rstd may differ in its last bit.
    assert differ() < 0.002
    module.rounding = "once"
    assert differ() > 0.05


def test_the_gradient_of_what_is_rounded_twice():
    module = randomised(RMSNorm(48, 1e-6, rounding="twice", weight_offset=1.0))
    x = torch.randn(4, 48, requires_grad=True)
    other, dy = x.detach().double().requires_grad_(), torch.randn(4, 48)
    weight = module.weight.detach().double().requires_grad_()
    module(x).backward(dy)
    F.rms_norm(other, (48,), weight + 1, 1e-6).backward(dy.double())
    close(x.grad, other.grad)
    close(module.weight.grad, weight.grad)


@pytest.mark.parametrize("class_", OF_TORCH)
def test_float64_is_computed_by_torch(class_):
    module = randomised(class_((2, 8), weight_offset=1.0)).double()
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    weight = module.weight + 1
    more = (module.bias, module.eps) if class_ is LayerNorm else (module.eps,)
    function = F.layer_norm if class_ is LayerNorm else F.rms_norm
    assert torch.equal(module(x), function(x, (2, 8), weight, *more))
    torch.autograd.gradcheck(module, x)
    module.out_dtype = torch.float32
    assert module(x).dtype == torch.float32
    add = (AddLayerNorm if class_ is LayerNorm else AddRMSNorm)(16).double()
    y, s = add(x.flatten(1), x.flatten(1))
    assert torch.equal(s, 2 * x.flatten(1)) and y.dtype == torch.float64


# ---- Sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [48, (2, 24)], ids=str)
@pytest.mark.parametrize("class_", [AddRMSNorm, AddLayerNorm])
def test_sums_and_their_gradients_are_those_of_float64(class_, shape):
    module = randomised(class_(shape, eps=1e-5))
    base = next(one for one in OF_TORCH if issubclass(class_, one))
    theirs = copy.deepcopy(module).double()
    theirs.__class__ = OF_TORCH[base]
    sizes = (3, 5, *(shape if isinstance(shape, tuple) else (shape,)))
    x, residual = (torch.randn(sizes).transpose(0, 1).requires_grad_() for _ in range(2))
    others = [one.detach().double().requires_grad_() for one in (x, residual)]
    y, s = module(x, residual)
    close(s, sum(others), 1e-6)
    close(y, theirs(sum(others)))
    dy, ds = torch.randn(y.shape), torch.randn(y.shape)
    torch.autograd.backward((y, s), (dy, ds))
    torch.autograd.backward((theirs(sum(others)), sum(others)), (dy.double(), ds.double()))
    for one, other in zip((x, residual, *module.parameters()), (*others, *theirs.parameters()), strict=True):
        close(one.grad, other.grad)


@pytest.mark.parametrize("class_", [AddRMSNorm, AddLayerNorm])
def test_without_a_residual_x_is_the_sum(class_):
    module, x = randomised(class_(48)), torch.randn(3, 48).to(BF16)
    y, s = module(x)
    assert s is x and torch.equal(
        y, RMSNorm.forward(module, x) if class_ is AddRMSNorm else LayerNorm.forward(module, x)
    )
    module.residual_dtype = torch.float32
    y, s = module(x)
    assert s.dtype == torch.float32 and torch.equal(s, x.float()) and y.dtype == BF16


# ---- Softmax ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("dim", [-1, 0, 1, 2, -2, None])
def test_softmax_along_any_dimension(dim):
    x = torch.randn(4, 5, 6).transpose(0, 2).requires_grad_()
    other = x.detach().double().requires_grad_()
    y, expected = Softmax(dim, scale=0.5)(x), torch.nn.Softmax(dim)(other * 0.5)
    close(y, expected)
    dy = torch.randn(y.shape)
    y.backward(dy)
    expected.backward(dy.double())
    close(x.grad, other.grad)


def test_softmax_takes_what_its_function_takes():
    x, mask = torch.randn(2, 3, 4, 4), torch.rand(2, 1, 4, 4) > 0.5
    y = Softmax(-1, scale=2.0)(x, mask, mask_keeps=True, causal="aligned", sink=torch.zeros(3))
    keep = mask & torch.ones(4, 4, dtype=torch.bool).tril()
    logits = (2 * x.double()).masked_fill(~keep, float("-inf"))
    close(y, torch.cat([logits, torch.zeros(2, 3, 4, 1)], -1).softmax(-1)[..., :-1])
    assert Softmax(3, out_dtype=BF16)(x, window=2, causal="upper_triangular").dtype == BF16


def test_softmax_of_other_types_is_torchs():
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(Softmax(1, scale=2.0)(x), (2 * x).softmax(1))
    assert Softmax(0)(torch.tensor(3.0)) == 1


# ---- Around torch ----------------------------------------------------------------------------------------------------


def test_modules_break_no_graph():
    for module in (RMSNorm(48), LayerNorm((2, 24)), RMSNorm(48, rounding="twice", elementwise_affine=False)):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        for name in ("rows", "part of a packed qkv", "four dimensions in another order"):
            x = INPUTS[name]()
            x = x if len(module.normalized_shape) == 1 else x.unflatten(-1, (2, 24))
            close(compiled(x), module(x))


FRESH = """
import sys
import transformer_rtc
assert "torch" not in sys.modules and "torch" not in transformer_rtc.__all__ and "torch" in dir(transformer_rtc)
names = transformer_rtc.torch.__all__
assert "torch" not in sys.modules and set(names) <= set(dir(transformer_rtc.torch))
with transformer_rtc.using("simulator"):
    module = transformer_rtc.torch.RMSNorm(64)
    import torch
    module(torch.randn(2, 64)).sum().backward()
transformer_rtc.torch.patch(torch.nn.Sequential(torch.nn.LayerNorm(8)))
for name in names:
    assert getattr(transformer_rtc.torch, name).__name__ == name
assert not hasattr(transformer_rtc.torch, "nothing")
assert not {"torch._dynamo", "transformers", "kernels"} & set(sys.modules)
print("done")
"""


def test_names_are_imported_when_they_are_first_used(tmp_path):
    assert output(FRESH, **shared(tmp_path)) == "done"
