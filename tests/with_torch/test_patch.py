# SPDX-License-Identifier: Apache-2.0
"""Norms of whole models, swapped: which are known, what stays as it was, and what a step then asks for."""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import pickle
import re

import kernel_cache
import pytest
from processes import output, shared

import transformer_rtc
from transformer_rtc import operator, usage, using, warming
from transformer_rtc.errors import ArgumentError
from transformer_rtc.manifest import line

torch = pytest.importorskip("torch")
nn = torch.nn

from transformer_rtc.torch import (  # noqa: E402
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    RMSNorm,
    Softmax,
    kernel_mapping,
    patch,
    patch_mapping,
    warmup,
)
from transformer_rtc.torch.warming import asked_by  # noqa: E402

BF16 = torch.bfloat16
SIZE = 48


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    manager = kernel_cache.manager()
    monkeypatch.setattr(operator, "manager", manager)
    monkeypatch.setattr(warming, "manager", manager)
    torch.manual_seed(29)
    with using("simulator"):
        yield


seeds = itertools.count(2_000_000)


def asked_in(call) -> set[str]:
    """Return what a call asks for, as a manifest's lines: on a device of its own, where there is no plan yet."""
    seen = []
    usage.observers.append(seen.append)
    try:
        with using(transformer_rtc.SimulatedDevice(seed=next(seeds))):
            call()
    finally:
        usage.observers.remove(seen.append)
    return {line(one) for one in seen}


# ---- Norms of other libraries ----------------------------------------------------------------------------------------


class OtherRMSNorm(nn.Module):
    """What the others have: a weight, and eps by one of its names."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps

    def normalised(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class LlamaRMSNorm(OtherRMSNorm):
    def forward(self, hidden_states):
        return self.weight * self.normalised(hidden_states).to(hidden_states.dtype)


class OlmoRMSNorm(OtherRMSNorm):
    def forward(self, hidden_states):
        return (self.weight * self.normalised(hidden_states)).to(hidden_states.dtype)


class PromotingRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return (self.weight.float() * self.normalised(x)).to(torch.promote_types(x.dtype, self.weight.dtype))


class GemmaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class WeightlessRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.eps = 1e-5

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


KNOWN = {
    LlamaRMSNorm: "x * rstd * weight, rounded once",
    OlmoRMSNorm: "x * rstd * weight, rounded once",
    PromotingRMSNorm: "x * rstd * weight, rounded once",
    GemmaRMSNorm: "x * rstd * (weight + 1), rounded once",
}


class RoundedRstdRMSNorm(WeightlessRMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class EpsOutsideRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return self.weight * x / (x.float().square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon).to(x.dtype)


class RoundedOffsetRMSNorm(GemmaRMSNorm):
    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight).float()).type_as(x)


class GroupedRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return (self.normalised(x.unflatten(-1, (2, -1))).flatten(-2) * self.weight).to(x.dtype)


class MeanRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return (self.normalised(x - x.mean(-1, keepdim=True)) * self.weight).to(x.dtype)


class In16BitsRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class OtherInTrainingRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x) * gate


class BiasRMSNorm(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))


class FailingRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        raise RuntimeError("needs a GPU")


class ChannelsLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


LEFT = {
    RoundedRstdRMSNorm: r"^for x of torch\.bfloat16 it computes something else",
    EpsOutsideRMSNorm: "it computes something else",
    RoundedOffsetRMSNorm: r"torch\.bfloat16 and a weight of torch\.bfloat16 it computes something else",
    GroupedRMSNorm: "it computes something else",
    MeanRMSNorm: "it computes something else",
    In16BitsRMSNorm: r"torch\.bfloat16 and a weight of torch\.bfloat16 it computes something else",
    OtherInTrainingRMSNorm: "it computes something else",
    GatedRMSNorm: "other arguments than one tensor",
    BiasRMSNorm: "it has other parameters",
    FailingRMSNorm: "its forward fails on the CPU: RuntimeError: needs a GPU",
    ChannelsLayerNorm: "it has a forward of its own",
}


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("class_", LEFT)
def test_what_computes_something_else_is_left_alone_and_said(class_, size):
    model = nn.Sequential(class_(2 * size))
    state = torch.random.get_rng_state()
    made = patch(model)
    assert not made.swapped and type(model[0]) is class_ and made.left.keys() == {"0"}
    assert re.search(LEFT[class_], made.left["0"])
    assert f"left 0: {made.left['0']}" in repr(made)
    assert torch.equal(state, torch.random.get_rng_state())


TYPES = [(torch.float32, torch.float32), (BF16, BF16), (BF16, torch.float32), (torch.float32, BF16)]


@pytest.mark.parametrize("class_", KNOWN)
def test_a_known_norm_keeps_its_values_its_types_and_its_gradients(class_):
    for x_dtype, weight_dtype in TYPES:
        module = class_(SIZE).to(weight_dtype)
        original = copy.deepcopy(module)
        made = patch(module)
        assert [(swap.name, swap.original, swap.formula) for swap in made.swapped] == [("", class_, KNOWN[class_])]
        x = torch.randn(3, 4, SIZE).transpose(0, 1).to(x_dtype)
        given = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = module(given[0]), original(given[1])
        assert y.dtype == expected.dtype and y.shape == expected.shape
        bound = 1e-5 if {x_dtype, weight_dtype} == {torch.float32} else 2e-2
        dy = torch.randn(y.shape).to(y.dtype)
        y.backward(dy)
        expected.backward(dy)
        for one, other in (
            (y, expected),
            (given[0].grad, given[1].grad),
            (module.weight.grad, original.weight.grad),
        ):
            assert one.dtype == other.dtype
            assert (one - other).abs().max() <= bound * other.abs().max()


def test_rounded_twice_keeps_the_bits_of_classes_that_do_so():
    x = torch.randn(256, SIZE).to(BF16)
    for class_, most in ((LlamaRMSNorm, 0.002), (OlmoRMSNorm, 0.002), (GemmaRMSNorm, 0.002)):
        module = class_(SIZE).to(BF16)
        expected = module(x)
        with patch(module, rounding="twice") as made:
            assert made.swapped[0].formula.endswith("rounded twice" if class_ is LlamaRMSNorm else "rounded once")
            assert (module(x) != expected).double().mean() <= most
        if class_ is LlamaRMSNorm:
            with patch(module):
                assert (module(x) != expected).double().mean() > 0.05


def test_a_norm_without_a_weight_is_known():
    model = nn.Sequential(WeightlessRMSNorm(SIZE))
    assert patch(model).swapped[0].formula == "x * rstd, rounded once" and not asked_by(model)
    for dtype, bound in ((torch.float32, 1e-5), (BF16, 1e-2), (torch.float64, 0)):
        x = torch.randn(3, SIZE, 2).transpose(1, 2).to(dtype)
        expected = WeightlessRMSNorm(SIZE)(x)
        y = model(x)
        assert y.dtype == dtype and (y - expected).abs().max() <= bound * expected.abs().max()


def test_float64_is_computed_by_the_original():
    module = LlamaRMSNorm(SIZE).double()
    x = torch.randn(3, SIZE, dtype=torch.float64)
    expected = module(x)
    patch(module)
    assert torch.equal(module(x), expected)


# ---- What stays ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = LlamaRMSNorm(SIZE), LlamaRMSNorm(SIZE)
        self.third, self.fourth = nn.LayerNorm(SIZE), nn.RMSNorm((2, SIZE // 2))
        self.tied, self.batch = self.first, nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.third(self.second(self.first(x)))
        return self.fourth(y.unflatten(-1, (2, -1)))


class OwnLayerNorm(nn.LayerNorm):
    """It has no forward of its own, and other methods."""

    def __init__(self, size, bias=False):
        super().__init__(size, eps=1e-3, bias=bias)

    def extra_repr(self):
        return "its own"


def test_a_patched_module_is_the_same_object_with_all_it_had():
    model = Block().eval()
    seen = []
    model.first.register_forward_hook(lambda module, given, y: seen.append(y))
    model.third.weight.requires_grad_(False)
    before = {name: id(one) for name, one in (*model.named_modules(), *model.named_parameters())}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, SIZE)
    expected = model(x)
    made = patch(model)
    assert [swap.name for swap in made.swapped] == ["first", "second", "third", "fourth"] and not made.left
    assert repr(made) == (
        "Patch of 4 modules\n  2 LlamaRMSNorm: x * rstd * weight, rounded once\n"
        "  1 LayerNorm: as torch.nn.LayerNorm\n  1 RMSNorm: as torch.nn.RMSNorm"
    )
    assert {name: id(one) for name, one in (*model.named_modules(), *model.named_parameters())} == before
    assert isinstance(model.first, LlamaRMSNorm) and type(model.first).__name__ == "LlamaRMSNorm"
    assert (
        isinstance(model.third, nn.LayerNorm) and not model.third.training and model.batch.__class__ is nn.BatchNorm1d
    )
    assert not model.third.weight.requires_grad and "by transformer_rtc" in repr(model)
    found = model(x)
    assert len(seen) == 2 and seen[1].shape == x.shape
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    model.load_state_dict(state)
    assert model.first(hidden_states=x).shape == x.shape


def test_patching_twice_is_harmless_and_undo_gives_the_classes_back():
    model = Block()
    classes = [type(one) for one in model.modules()]
    first = patch(model)
    patched = [type(one) for one in model.modules()]
    second = patch(model, rounding="twice")
    assert not second.swapped and not second.left and [type(one) for one in model.modules()] == patched
    second.undo()
    assert [type(one) for one in model.modules()] == patched
    first.undo()
    first.undo()
    assert [type(one) for one in model.modules()] == classes and not first.swapped
    with patch(model) as made:
        assert [type(one) for one in model.modules()] == patched and len(made.swapped) == 4
    assert [type(one) for one in model.modules()] == classes
    made = patch(model)
    model.second.__class__ = OtherRMSNorm
    with pytest.raises(ArgumentError, match=r"^second: the class was changed after patch\(\)"):
        made.undo()
    assert type(model.first) is LlamaRMSNorm and type(model.third) is nn.LayerNorm


def test_copies_and_pickles_are_patched():
    model = nn.ModuleList([LlamaRMSNorm(SIZE), OwnLayerNorm(SIZE), nn.LayerNorm(SIZE)])
    patch(model, rounding="twice")
    x = torch.randn(3, SIZE)
    for made in (copy.deepcopy(model), copy.copy(model), *(pickle.loads(pickle.dumps(model, p)) for p in (0, 2, 5))):
        for one, other in zip(made, model, strict=True):
            assert type(one) is type(other) and torch.equal(one(x), other(x))


def test_subclasses_of_torchs_keep_their_own_methods():
    module, other = OwnLayerNorm(SIZE), nn.LayerNorm(SIZE, eps=1e-3, bias=False)
    patch(module)
    assert isinstance(module, OwnLayerNorm) and isinstance(module, LayerNorm)
    assert repr(module) == "OwnLayerNorm(its own, by transformer_rtc)"
    x = torch.randn(3, SIZE)
    assert (module(x) - other(x)).abs().max() < 1e-5
    assert type(module)(SIZE).eps == 1e-3


def test_a_forward_that_was_replaced_in_the_module_is_left():
    module = LlamaRMSNorm(SIZE)
    module.forward = lambda x: x
    made = patch(module)
    assert made.left == {"": "its forward was replaced, in the module itself"}
    assert "left the model: its forward was replaced" in repr(made)


def test_a_model_without_memory_is_patched_and_a_mode_of_the_caller_does_not_matter():
    with torch.device("meta"):
        model = Block()
        assert len(patch(model).swapped) == 4
    with torch.autocast("cpu", dtype=BF16), torch._subclasses.FakeTensorMode():
        assert len(patch(nn.Sequential(LlamaRMSNorm(SIZE))).swapped) == 1


def test_what_is_no_model_is_refused():
    with pytest.raises(ArgumentError, match="model is 3; it takes a torch"):
        patch(3)
    with pytest.raises(ArgumentError, match="rounding is 'never'; it takes once, twice"):
        patch(Block(), rounding="never")


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

CONFIGS = {
    "Llama": {"num_key_value_heads": 1},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 32},
    "Gemma3Text": {"num_key_value_heads": 1, "head_dim": 32},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
# Norms, and activations or gated MLPs.
SWAPPED = {"Llama": 5 + 2, "Qwen3": 9 + 2, "Gemma3Text": 13 + 2, "GPT2": 5 + 2, "Bert": 6 + 3}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


def model_of(name: str):
    """Return a tiny model with random weights, and the class it is of."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
        **CONFIGS[name],
    )
    class_ = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))
    model = class_(config)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            for parameter in module.parameters():
                parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


def step(model, tokens):
    model.zero_grad()
    found = model(input_ids=tokens, labels=tokens)
    found.loss.backward()
    return found.logits.detach(), {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_hugging_face_has_the_same_logits_and_gradients(name):
    model = model_of(name)
    tokens = torch.randint(3, 64, (2, 7))
    logits, gradients = step(model, tokens)
    made = patch(model)
    assert len(made.swapped) == SWAPPED[name] and not made.left
    known = {line(one) for one in asked_by(model)}
    found, found_gradients = step(model, tokens)
    assert asked_in(lambda: step(model, tokens)) == known
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    for key, gradient in gradients.items():
        # Some are 0 but for rounding, such as that of a bias of keys.
        assert (found_gradients[key] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, key


def test_models_of_a_patch_mapping_are_made_of_patched_norms():
    model_of("Llama")
    patching = pytest.importorskip("transformers.monkey_patching")
    transformers = pytest.importorskip("transformers")
    mapping = patch_mapping(transformers.LlamaForCausalLM, transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm)
    assert mapping.keys() == {"LlamaRMSNorm", "Gemma3RMSNorm"}
    config = model_of("Llama").config
    tokens = torch.randint(3, 64, (2, 7))
    patching.register_patch_mapping(mapping)
    try:
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        patching.unregister_patch_mapping(list(mapping))
    torch.manual_seed(3)
    other = transformers.AutoModelForCausalLM.from_config(config)
    assert not patch(model, activations=False).swapped and len(asked_by(model)) == 2
    logits, _ = step(other, tokens)
    assert (step(model, tokens)[0] - logits).abs().max() <= 1e-5 * logits.abs().max()
    with pytest.raises(ArgumentError, match="classes has 3; it takes classes of modules"):
        patch_mapping(3)
    with pytest.raises(ArgumentError, match="none of these, nor of their files, is a known RMSNorm"):
        patch_mapping(GatedRMSNorm, nn.Linear)


KERNELIZED = """
import sys
sys.path.remove("")  # a file of the tests has the package's name
import kernels
import torch
import transformer_rtc
from transformer_rtc import usage
from transformer_rtc.torch import kernel_mapping, patch
from transformer_rtc.torch.warming import asked_by

class Norm(torch.nn.Module):
    def __init__(self, size, offset, eps_name):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size))
        self.offset = offset
        setattr(self, eps_name, 1e-5)
    def forward(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight + self.offset, 1e-5)

Llama = kernels.use_kernel_forward_from_hub("RMSNorm")(type("Llama", (Norm,), {}))
Qwen = kernels.use_kernel_forward_from_hub("RMSNormZeroCentered")(type("Qwen", (Norm,), {}))
model = torch.nn.Sequential(Llama(48, 0.0, "variance_epsilon"), Qwen(48, 1.0, "eps"))
x = torch.randn(3, 48)
expected, expected_in_float64 = model(x), model.double()(x.double())
model.float()
on_host = {name: {"cpu": layers["cuda"]} for name, layers in kernel_mapping().items()}
with kernels.use_kernel_mapping(on_host, inherit_mapping=False):
    kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
known = {str(one) for one in asked_by(model)}
seen = []
usage.observers.append(seen.append)
with transformer_rtc.using("simulator"):
    y = model(x.requires_grad_())
    y.sum().backward()
assert len(known) == 2 and {str(one) for one in seen} == known
assert 0 < (y - expected).abs().max() <= 1e-5 * expected.abs().max()
assert torch.equal(model.double()(x.double()), expected_in_float64)
assert not patch(model).swapped
print("done")
"""


def test_a_kernel_mapping_is_one_for_kernelize(tmp_path):
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package kernels is not installed")
    assert output(KERNELIZED, **shared(tmp_path)) == "done"


def test_equal_kernel_mappings_are_equal():
    assert kernel_mapping() == kernel_mapping() != kernel_mapping(rounding="twice")
    with pytest.raises(ArgumentError, match="rounding is 2; it takes once, twice"):
        kernel_mapping(rounding=2)


# ---- What is compiled before -----------------------------------------------------------------------------------------


def given(shape, dtype=torch.float32):
    return torch.randn(3, *shape).to(dtype).requires_grad_()


MODULES = {
    "weight": lambda: (RMSNorm(SIZE), [(SIZE,)], None),
    "types": lambda: (LayerNorm(SIZE), [(SIZE,)], BF16),
    "twice": lambda: (RMSNorm(SIZE, rounding="twice"), [(SIZE,)], BF16),
    "margin": lambda: (LayerNorm(SIZE, bias=False, sm_margin=3), [(SIZE,)], None),
    "none": lambda: (LayerNorm(SIZE, elementwise_affine=False), [(SIZE,)], None),
    "several": lambda: (RMSNorm((2, 24), out_dtype=BF16), [(2, 24)], None),
    "frozen": lambda: (LayerNorm(SIZE).requires_grad_(False), [(SIZE,)], BF16),
    "half": lambda: (LayerNorm(SIZE), [(SIZE,)], torch.float16),
    "softmax": lambda: (Softmax(-1, scale=2.0, out_dtype=torch.float32), [(SIZE,)], BF16),
    "patched": lambda: (patched(LlamaRMSNorm(SIZE).to(BF16)), [(SIZE,)], torch.float32),
}


def patched(module):
    patch(module)
    return module


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_asks_for_is_known(name):
    module, shapes, dtype = MODULES[name]()
    own = dtype or torch.float32

    def train():
        module(*(given(shape, own) for shape in shapes)).sum().backward()

    assert asked_in(train) == {line(one) for one in asked_by(module, dtype, training=True, keys=SIZE)}
    with torch.no_grad():
        asked = asked_in(lambda: module(*(given(shape, own) for shape in shapes)))
    assert asked == {line(one) for one in asked_by(module, dtype, training=False, keys=[SIZE])}


@pytest.mark.parametrize("class_", [AddRMSNorm, AddLayerNorm])
def test_what_a_norm_of_a_sum_asks_for_is_known(class_):
    module = class_(SIZE)
    shape = (SIZE,)

    def train():
        y, _ = module(given(shape))
        y.sum().backward()  # the first
        sum(one.sum() for one in module(given(shape), given(shape))).backward()
        module(given(shape), given(shape))[0].sum().backward()  # the last: the sum is not used

    assert asked_in(train) == {line(one) for one in asked_by(module)}


def test_a_model_is_compiled_for_as_it_is():
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), OlmoRMSNorm(SIZE), OlmoRMSNorm(SIZE))
    patch(model)
    assert len(asked_by(model)) == 4  # each once
    assert asked_by(model.eval()) == asked_by(model, training=False) != asked_by(model, training=True)
    assert len(asked_by(model, [BF16, torch.float32])) == 4
    records = warmup(model, architectures="sm_90", threads=1)
    assert {record.architecture for record in records} == {"sm_90"} and all(not record.error for record in records)
    again = warmup(model, architectures="sm_90")
    assert {record.status for record in again} == {"cached"}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: warmup(3), "model is 3; it takes a torch"),
        (lambda: warmup(nn.Linear(2, 2)), "model has no module of transformer_rtc"),
        (lambda: warmup(Softmax(-1)), "model has no module of transformer_rtc"),
        (lambda: warmup(RMSNorm(8), torch.float64), r"dtype is torch\.float64; it takes torch\.bfloat16"),
        (lambda: warmup(Softmax(-1), keys=[0]), "keys has 0; it takes integers from 1"),
        (lambda: warmup(RMSNorm(8).double()), "model has no module of transformer_rtc"),
    ],
)
def test_what_cannot_be_compiled_is_told(call, told):
    with pytest.raises(ArgumentError, match=told):
        call()
