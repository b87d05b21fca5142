# SPDX-License-Identifier: Apache-2.0
"""Activations in torch: gradients, the modules, and the swap of those that a model has."""

from __future__ import annotations

import copy
import pickle

import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, using

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from transformer_rtc import torch as trt  # noqa: E402
from transformer_rtc.torch.warming import asked_by  # noqa: E402


@pytest.fixture(autouse=True)
def simulator():
    torch.manual_seed(3)
    with using(SimulatedDevice()):
        yield


def gelu(x):
    return functional.gelu(x)


def gelu_tanh(x):
    return functional.gelu(x, approximate="tanh")


CASES = {
    "gelu": (gelu, {}), "gelu tanh": (gelu_tanh, {"approximate": "tanh"}), "silu": (functional.silu, {}),
    "relu_squared": (lambda x: functional.relu(x).square(), {}),
}  # fmt: skip
GATED = {
    "gelu_and_mul": (gelu, {}), "gelu_and_mul tanh": (gelu_tanh, {"approximate": "tanh"}),
    "silu_and_mul": (functional.silu, {}),
}  # fmt: skip


def leaf(*shape, dtype=torch.float32):
    return (2 * torch.randn(shape)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64(name, dtype):
    function, options = CASES[name]
    x = leaf(4, 37, dtype=dtype)
    y = getattr(transformer_rtc, name.split()[0])(x, **options)
    double = x.detach().double().requires_grad_()
    exact = function(double)
    near = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), exact, rtol=near, atol=near)
    gradient = torch.randn(y.shape).to(dtype)
    y.backward(gradient)
    exact.backward(gradient.double())
    assert x.grad.dtype == y.dtype == dtype
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=near, atol=near)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", GATED)
def test_gradients_of_gated_ones_are_those_of_float64(name, packed):
    function, options = GATED[name]
    call = getattr(transformer_rtc, name.split()[0])
    gate, up = leaf(2, 3, 40), leaf(2, 3, 40)
    inputs = [torch.cat([gate, up], -1).detach().requires_grad_()] if packed else [gate, up]
    y = call(*inputs, **options)
    doubles = [one.detach().double().requires_grad_() for one in (gate, up)]
    exact = function(doubles[0]) * doubles[1]
    torch.testing.assert_close(y.double(), exact, rtol=2e-6, atol=2e-6)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    exact.backward(gradient.double())
    found = [*inputs[0].grad.chunk(2, -1)] if packed else [one.grad for one in inputs]
    for one, other in zip(found, doubles, strict=True):
        torch.testing.assert_close(one.double(), other.grad, rtol=4e-6, atol=4e-6)


def test_a_gate_alone_may_need_a_gradient():
    gate, up = leaf(3, 8), torch.randn(3, 8)
    transformer_rtc.silu_and_mul(gate, up).sum().backward()
    double = gate.detach().double().requires_grad_()
    (functional.silu(double) * up.double()).sum().backward()
    torch.testing.assert_close(gate.grad.double(), double.grad, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_code_has_the_operator(packed):
    x, up = torch.randn(4, 64), torch.randn(4, 64)
    given = (torch.cat([x, up], -1),) if packed else (x, up)

    def function(*given):
        return transformer_rtc.silu_and_mul(*given) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), function(*given), rtol=0, atol=0)


# ---- Modules ---------------------------------------------------------------------------------------------------------


def test_modules_are_those_of_torch():
    x = torch.randn(3, 5, 16)
    for ours, theirs in (
        (trt.GELU(), torch.nn.GELU()), (trt.GELU("tanh"), torch.nn.GELU("tanh")), (trt.SiLU(), torch.nn.SiLU()),
        (trt.SiLU(inplace=True), torch.nn.SiLU(inplace=True)),
    ):  # fmt: skip
        assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
        for given in (x, x.double(), x.transpose(0, 2), x[..., ::2], torch.tensor(0.5)):
            torch.testing.assert_close(ours(given.clone()), theirs(given.clone()), rtol=2e-6, atol=2e-6)


def test_gated_modules_take_one_tensor_or_two():
    x, up = torch.randn(4, 24), torch.randn(4, 24)
    for module, function in (
        (trt.SwiGLU(), functional.silu), (trt.GEGLU(), functional.gelu), (trt.GEGLU("tanh"), gelu_tanh),
    ):  # fmt: skip
        wanted = function(x) * up
        torch.testing.assert_close(module(x, up), wanted, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(module(torch.cat([x, up], -1)), wanted, rtol=2e-6, atol=2e-6)
        wide = torch.randn(4, 48)
        torch.testing.assert_close(module(wide[:, ::2], up), function(wide[:, ::2]) * up, rtol=2e-6, atol=2e-6)


# ---- Patching --------------------------------------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """As most of Hugging Face's have it."""

    def __init__(self, act_fn=None, swaps: bool = False):
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(8, 24, bias=False), torch.nn.Linear(8, 24, bias=False)
        self.down_proj, self.act_fn = torch.nn.Linear(24, 8, bias=False), act_fn or torch.nn.SiLU()
        self.swaps = swaps

    def forward(self, hidden):
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        return self.down_proj(self.act_fn(up) * gate if self.swaps else self.act_fn(gate) * up)


class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Linear(8, 48), torch.nn.Linear(24, 8)
        self.activation_fn = torch.nn.GELU("tanh")

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class QuickGELU(torch.nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class OwnGELU(torch.nn.Module):
    def forward(self, input):
        return 0.5 * input * (1 + torch.tanh(0.7978845608028654 * (input + 0.044715 * input**3)))


def test_activations_and_gated_mlps_of_a_model_are_swapped_and_given_back():
    model = torch.nn.Sequential(Mlp(), Packed(), torch.nn.GELU(), OwnGELU(), QuickGELU(), torch.nn.ReLU())
    x = torch.randn(5, 8)
    before = [type(one) for one in model.modules()]
    wanted = model(x)
    made = trt.patch(model)
    assert {swap.name: swap.formula for swap in made.swapped} == {
        "0": "silu(gate) * up in one launch",
        "1": "gelu(gate) * up in one launch",
        "2": "as torch.nn.GELU",
        "3": "gelu, approximated by tanh",
    }
    assert made.left == {"4": "it computes something else than the known functions"}
    assert not trt.patch(torch.jit.script(torch.nn.Sequential(torch.nn.GELU()))).swapped
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)
    # The one tensor of a forward keeps its name.
    torch.testing.assert_close(model[0](hidden=x), made_of(Mlp, model[0])(x), rtol=1e-5, atol=1e-6)
    assert not trt.patch(model).swapped
    made.undo()
    assert [type(one) for one in model.modules()] == before and torch.equal(model(x), wanted)


def made_of(class_, module):
    plain = class_()
    plain.load_state_dict(module.state_dict())
    return plain


class Changed(Mlp):
    """Computes something else: what it says of x, gate, up, their product or what comes of it."""

    def __init__(self, x=None, gate=None, up=None, product=None, y=None):
        super().__init__()
        same = lambda one: one  # noqa: E731
        self.of = [one or same for one in (x, gate, up, product, y)]

    def forward(self, x):
        of_x, of_gate, of_up, of_product, of_y = self.of
        gate, up = self.gate_proj(of_x(x)), self.up_proj(x)
        return of_y(self.down_proj(of_product(self.act_fn(of_gate(gate)) * of_up(up))))


def dropped(x):
    return functional.dropout(x, 0.1)


def test_what_is_no_known_gated_mlp_stays():
    replaced = Mlp()
    replaced.forward = lambda x: x
    changed = (
        Changed(x=lambda x: 2 * x), Changed(gate=lambda x: x.clamp(max=50)), Changed(up=lambda x: x.clamp(-99, 99)),
        Changed(product=dropped), Changed(y=dropped), Changed(y=lambda x: x + 1), Changed(up=torch.Tensor.float),
        Changed(product=lambda x: x.float().to(torch.bfloat16)),
    )  # fmt: skip
    for model in (Mlp(swaps=True), Mlp(torch.nn.Tanh()), Mlp(QuickGELU()), replaced, *changed):
        made = trt.patch(model)
        assert "" not in {swap.name for swap in made.swapped} and made.left[""], model
    assert "" in {swap.name for swap in trt.patch(Changed()).swapped}
    assert not trt.patch(Mlp(), activations=False).swapped


class OtherGELU(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.gelu(x).clamp(max=50), lambda x: functional.gelu(x.float()),
        lambda x: dropped(functional.gelu(x)), lambda x: functional.gelu(x) + 1e-3, lambda x: x.flatten(),
    ],
)  # fmt: skip
def test_what_is_no_known_function_stays(function):
    made = trt.patch(OtherGELU(function))
    assert not made.swapped and made.left.keys() == {""}


def test_what_a_module_is_does_not_depend_on_defaults():
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        model = torch.nn.Sequential(Mlp(), OwnGELU(), torch.nn.GELU())
        assert [swap.name for swap in trt.patch(model).swapped] == ["0", "1", "2"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_a_hook_on_the_function_of_a_swapped_mlp_is_called():
    model, x, seen = Mlp(), torch.randn(3, 8), []
    trt.patch(model)
    handle = model.act_fn.register_forward_hook(lambda module, given, y: seen.append(y))
    wanted = model(x)
    handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)


def test_tensors_without_elements_and_in_other_orders_are_taken():
    for module, theirs in ((trt.GELU(), torch.nn.GELU()), (trt.SiLU(), torch.nn.SiLU())):
        for x in (torch.randn(4, 0), torch.randn(0, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
            y = module(x)
            assert y.stride() == theirs(x).stride()
            torch.testing.assert_close(y, theirs(x), rtol=2e-6, atol=2e-6)
    with pytest.raises(transformer_rtc.ArgumentError, match="approximate is 'erf'; it takes none, tanh"):
        trt.GEGLU("erf")


def test_gradients_of_a_swapped_mlp_are_those_of_before():
    model = Mlp()
    x = leaf(6, 8)
    model(x).square().sum().backward()
    wanted = [x.grad, *(one.grad for one in model.parameters())]
    x.grad = None
    model.zero_grad()
    trt.patch(model)
    model(x).square().sum().backward()
    for one, other in zip([x.grad, *(one.grad for one in model.parameters())], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_a_swapped_model_is_copied_saved_and_moved_to_other_types():
    model = torch.nn.Sequential(Mlp(), OwnGELU())
    trt.patch(model)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    x = torch.randn(3, 8)
    assert torch.equal(other(x), model(x)) and "by transformer_rtc" in repr(other)
    double = other.double()
    plain = torch.nn.Sequential(made_of(Mlp, double[0]).double(), OwnGELU())
    torch.testing.assert_close(double(x.double()), plain(x.double()))


@pytest.mark.parametrize("training", [False, True])
def test_a_warmed_model_asks_for_nothing_else(training):
    model = torch.nn.Sequential(
        Mlp(), Packed(), torch.nn.GELU(), OwnGELU(), torch.nn.Linear(8, 16), trt.SwiGLU(), torch.nn.Linear(8, 8)
    ).to(torch.float16)  # no other test here has this type
    trt.patch(model)
    asked = {str(one.request._replace(columns=0)) for one in asked_by(model, training=training)}
    x = torch.randn(4, 8).half()
    with transformer_rtc.record() as earlier:  # of other tests of this process
        pass
    with transformer_rtc.record() as seen:
        if training:
            model(x.requires_grad_()).sum().backward()
        else:
            with torch.no_grad():
                model(x)
    requests = [one.request._replace(columns=0, unaligned=False) for one in seen if hasattr(one, "request")]
    before = {str(one.request._replace(columns=0, unaligned=False)) for one in earlier if hasattr(one, "request")}
    found = {
        str(one) for one in requests if str(one) not in before and getattr(one.dtypes.get("x"), "name", "") == "float16"
    }
    names = {"silu_and_mul", "gelu_and_mul", "gelu"}
    assert names <= {one.operator for one in requests} and found <= asked, found - asked


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "gpt2", "bert", "vit"])
def test_models_of_hugging_face_have_theirs_swapped(name):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = {
        "llama": lambda: transformers.LlamaConfig(**small, vocab_size=64, num_key_value_heads=2),
        "phi3": lambda: transformers.Phi3Config(**small, vocab_size=64, num_key_value_heads=2, pad_token_id=0),
        "gemma2": lambda: transformers.Gemma2Config(**small, vocab_size=64, num_key_value_heads=2, head_dim=16),
        "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, bos_token_id=1,
                                                eos_token_id=1),
        "bert": lambda: transformers.BertConfig(**small, vocab_size=64),
        "vit": lambda: transformers.ViTConfig(**small, image_size=32, patch_size=16),
    }  # fmt: skip
    model = transformers.AutoModel.from_config(made[name]())
    swapped = [swap.formula for swap in trt.patch(model).swapped]
    wanted = {"llama": "silu(gate) * up", "phi3": "silu(gate) * up", "gemma2": "gelu(gate) * up", "gpt2": "gelu",
              "bert": "gelu", "vit": "gelu"}[name]  # fmt: skip
    assert any(wanted in formula for formula in swapped), swapped
