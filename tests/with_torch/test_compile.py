# SPDX-License-Identifier: Apache-2.0
"""torch.compile, export, checkpoints and modes on the public functions and on modules: the bits of eager mode."""

from __future__ import annotations

import functools

import kernel_cache
import numpy as np
import pytest

import transformer_rtc
from transformer_rtc import operator, using
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from transformer_rtc import (  # noqa: E402
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    log_softmax,
    rms_norm,
    rms_norm_add,
    rms_norm_backward,
    softmax,
)
from transformer_rtc.torch import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, Softmax  # noqa: E402

SIZE = 40
OPS = torch.ops.transformer_rtc


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    torch._dynamo.reset()
    torch.manual_seed(23)
    with using("simulator"):
        yield
    torch._dynamo.reset()


def leaf(*shape: int):
    return torch.randn(*shape).requires_grad_()


def results(call, *leaves):
    """Return what a call returns, and the gradients of all of it."""
    found = call(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    with_gradients = [one for one in found if one.requires_grad]
    torch.manual_seed(1)
    weights = [torch.randn_like(one) for one in with_gradients]
    needed = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    return [*found, *torch.autograd.grad(with_gradients, needed, weights)]


def check(call, *leaves, backend="aot_eager"):
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for found, expected in zip(results(compiled, *leaves), results(call, *leaves), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


CALLS = {
    "rms_norm": lambda x, r, w: rms_norm(x, w),
    "by position": lambda x, r, w: layer_norm(x, w, w, 1e-3),
    "several results": lambda x, r, w: rms_norm(x, weight=w, return_rstd=True, weight_offset=1.0),
    "named types": lambda x, r, w: add_rms_norm(x, r, w, out_dtype="bfloat16", residual_dtype=torch.float32),
    "two launches": lambda x, r, w: rms_norm_add(rms_norm(x), r, w, eps=1e-4),
    "softmax": lambda x, r, w: softmax(x[None], scale=0.5, causal="aligned", window=3, mask=r, sink=w[:1]),
    "log_softmax": lambda x, r, w: log_softmax(x + r) * w,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_call_has_the_bits_of_the_eager_one(call):
    leaves = leaf(6, SIZE), leaf(6, SIZE), leaf(SIZE)
    leaves = leaves[: 2 if call in ("rms_norm", "several results", "by position") else 3]
    if len(leaves) == 2:
        check(lambda x, w: CALLS[call](x, None, w[0]), leaves[0], leaves[1])
    else:
        check(CALLS[call], *leaves)


@pytest.mark.parametrize("module", [
    RMSNorm(SIZE), LayerNorm((2, SIZE // 2)), RMSNorm(SIZE, rounding="twice", elementwise_affine=False),
    LayerNorm(SIZE, zero_centered_gamma=True, out_dtype=torch.float16), AddRMSNorm(SIZE), AddLayerNorm(SIZE),
    Softmax(1),
], ids=repr)  # fmt: skip
def test_a_compiled_module_has_the_bits_of_the_eager_one(module):
    x = leaf(3, 6, SIZE)
    x = x.detach().unflatten(-1, (2, -1)).requires_grad_() if getattr(module, "normalized_shape", ()) == (2, 20) else x
    for given in (x, x.transpose(0, 1)):
        check(lambda x: module(x), given.detach().requires_grad_())


@pytest.mark.thorough  # 10 seconds
def test_inductor_compiles_what_is_around():
    def block(x, weight):
        return torch.nn.functional.silu(rms_norm(x * 2, weight)) + softmax(x)

    x, weight = leaf(6, SIZE), leaf(SIZE)
    compiled = torch.compile(block, fullgraph=True)
    for found, expected in zip(results(compiled, x, weight), results(block, x, weight), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_is_written_is_written():
    def call(x, out, s, amax):
        rms_norm(x, out=out)
        add_rms_norm(x, x, residual_out=s, out=x)
        scaled = rms_norm(s, out_dtype=torch.float8_e4m3fn, scale=torch.full((1,), 2.0), amax=amax)
        return scaled.float()

    def written(call):
        given = [x.clone(), torch.zeros(6, SIZE, dtype=torch.bfloat16), torch.zeros(6, SIZE), torch.zeros(())]
        return [call(*given), *given]

    x = torch.randn(6, SIZE)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, expected in zip(written(compiled), written(call), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(("call", "error"), [
    (lambda x: rms_norm(x, out=x), "out is written in place, which records no gradient"),
    (lambda x: rms_norm(x, stream=0), "stream must be None where torch traces"),
    (lambda x: rms_norm(x.detach(), out=torch.empty(5, SIZE)), "out must have the shape"),
    (lambda x: rms_norm(x.detach(), out=torch.empty(6, SIZE), out_dtype=torch.float16), "where torch.float16 was"),
    (lambda x: rms_norm(x.detach(), eps=x[0, 0]), "eps is a tensor that requires grad"),
    (lambda x: rms_norm_backward(x.detach(), x.detach(), out=x, return_dx=False), "out was given, but return_dx is"),
    (lambda x: rms_norm(x, out_dtype="float31"), "must be one of float32, .* it is 'float31'"),
    (lambda x: rms_norm(x.detach(), out_dtype="bool"), "out_dtype must be one of"),
], ids=range(8))  # fmt: skip
def test_what_cannot_be_is_refused_where_it_is_traced(call, error):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = leaf(6, SIZE)
    with pytest.raises(ArgumentError, match=error):
        make_fx(call)(x)
    with pytest.raises(Exception, match=error):
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parametrize("call", [lambda x: rms_norm(x, epsilon=1), lambda x: rms_norm(x, x, 1, 2)], ids=range(2))
def test_a_call_that_python_refuses_is_refused(call):
    with pytest.raises(TypeError, match="rms_norm"):
        call(torch.randn(6, SIZE))
    with pytest.raises(Exception, match=r"TypeError|argument"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(torch.randn(6, SIZE))


def test_a_wrong_input_is_refused_when_the_compiled_function_runs():
    compiled = torch.compile(lambda x: rms_norm(x) + 1, fullgraph=True, backend="aot_eager")
    with pytest.raises(ArgumentError, match=r"x must be one of float32, float16, bfloat16; it is torch.float64"):
        compiled(torch.randn(6, SIZE, dtype=torch.float64))


def test_other_numbers_of_rows_compile_nothing():
    x, weight = leaf(6, SIZE), leaf(SIZE)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(x, weight)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 3, 17):
            x = torch.randn(rows, SIZE, requires_grad=True)
            rms_norm(x, weight)  # nor does an eager call
            assert compiled(x, weight).equal(rms_norm(x, weight))


def lengths(*sizes):
    return torch.randn(*sizes, requires_grad=True)


OF_HEADS = torch.rand(3, SIZE)
DYNAMIC = {
    "lengths": (lambda x: softmax(x, causal="upper_triangular"), lambda n: lengths(2, n, n)),
    "windows": (lambda x: softmax(x, causal="aligned", window=x.shape[-1] // 2), lambda n: lengths(2, n, n)),
    "masks": (lambda x: log_softmax(x, mask=x.detach()[:1] > 0), lambda n: lengths(n, 5, n + 2)),
    "heads": (lambda x: rms_norm(x, OF_HEADS, return_rstd=True), lambda n: lengths(n, 3, SIZE)),
    "hidden": (lambda x: layer_norm(x, x[0].detach()), lambda n: lengths(n, 8 * n)),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_other_sizes_compile_nothing(name):
    call, made = DYNAMIC[name]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for size in (4, 5, 6, 9):  # the second size finds out what is dynamic
        x = made(size)
        for found, expected in zip(results(compiled, x), results(call, x), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count == 2


@pytest.mark.parametrize("dtype", ["float16", "f2", np.float16, np.dtype("float16"), torch.float16], ids=str)
def test_a_data_type_of_any_framework_is_traced(dtype):
    x = torch.randn(6, SIZE)
    found = torch.compile(lambda x: rms_norm(x, out_dtype=dtype), fullgraph=True, backend="aot_eager")(x)
    assert found.equal(rms_norm(x, out_dtype=torch.float16))


def test_what_a_view_or_two_arguments_stand_for_is_written():
    def call(x, residual, wide):
        y, s = add_rms_norm(x, residual, out=x, residual_out=residual)
        rms_norm(s, out=wide[:, :SIZE])
        return y * 2, s

    def written(call):
        given = [x.clone(), residual.clone(), torch.zeros(6, 2 * SIZE)]
        return [*call(*given), *given]

    x, residual = torch.randn(6, SIZE), torch.randn(6, SIZE)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(one.equal(other) for one, other in zip(written(compiled), written(call), strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    x, weight = leaf(6, SIZE), leaf(SIZE)
    with mode():
        found = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")(x, weight)
        assert found.equal(rms_norm(x, weight)) and not found.requires_grad


def test_autocast_is_ignored():
    x, weight = leaf(6, SIZE), leaf(SIZE)
    call = torch.compile(lambda x: rms_norm(x @ x.T @ x, weight), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype == torch.bfloat16 and call(x).equal(rms_norm(x @ x.T @ x, weight))


def test_a_second_derivative_is_refused():
    x = leaf(6, SIZE)
    y = torch.compile(lambda x: rms_norm(x), fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match=r"does not .*support double backward|double backwards"):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.sum().backward()
    (dx,) = torch.autograd.grad(OPS.rms_norm(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm has no second derivative"):
        dx.sum().backward()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = AddRMSNorm(SIZE), LayerNorm(SIZE)

    def forward(self, x):
        y, s = self.norm(x * 2, x)
        return self.last(y) + softmax(s)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_operators(strict):
    model, rows = Block(), torch.export.Dim("rows", min=2)
    program = torch.export.export(model, (torch.randn(4, SIZE),), dynamic_shapes={"x": {0: rows}}, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if "transformer_rtc" in str(node.target)]
    assert names == [f"transformer_rtc.{name}.default" for name in ("add_rms_norm", "layer_norm", "softmax")]
    for rows in (4, 9):
        x = torch.randn(rows, SIZE)
        assert program.module()(x).equal(model(x))


@pytest.mark.thorough
def test_a_program_compiled_ahead_runs_in_a_python_process(tmp_path):
    model = Block().eval()
    program = torch.export.export(model, (torch.randn(4, SIZE),))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    x = torch.randn(4, SIZE)
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again(reentrant):
    leaves = leaf(6, SIZE), leaf(SIZE)
    y, *expected = results(rms_norm, *leaves)
    found = checkpoint(rms_norm, *leaves, use_reentrant=reentrant)
    torch.manual_seed(1)
    found.backward(torch.randn_like(found))
    assert found.equal(y) and all(one.grad.equal(other) for one, other in zip(leaves, expected, strict=True))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_selective_checkpoint_saves_the_operator_s_results(monkeypatch, policy):
    native, calls = operator.operator_of("rms_norm"), []
    direct = native.direct
    monkeypatch.setattr(native, "direct", lambda *values: calls.append(1) or direct(*values))

    def choose(context, op, *arguments, **keywords):
        return policy if op == OPS.rms_norm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    leaves = leaf(6, SIZE), leaf(SIZE)
    expected = results(rms_norm, *leaves)
    call = functools.partial(checkpoint, rms_norm, use_reentrant=False, context_fn=contexts)
    found = results(call, *leaves)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert len(calls) == (1 if policy == CheckpointPolicy.MUST_SAVE else 2)


def test_saved_tensors_may_be_elsewhere():
    leaves = leaf(6, SIZE), leaf(SIZE)
    expected = results(rms_norm, *leaves)
    with torch.autograd.graph.save_on_cpu():
        found = results(rms_norm, *leaves)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_a_traced_call_is_no_constant():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight, other = torch.randn(6, SIZE), torch.rand(SIZE), torch.randn(6, SIZE)
    call = lambda x: layer_norm(x, weight) * 2  # noqa: E731
    assert make_fx(call)(x)(other).equal(call(other))
    symbolic = make_fx(lambda x, weight: layer_norm(x, weight) * 2, tracing_mode="symbolic")(x, weight)
    assert symbolic(other[:3], weight).equal(call(other[:3]))
    with pytest.warns(DeprecationWarning):
        traced = torch.jit.trace(call, x)
    assert traced(other).equal(call(other))


def test_a_fake_mode_around_real_tensors_gives_fakes():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    x, weight = torch.randn(6, SIZE), torch.rand(SIZE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        dx, dweight, dbias = layer_norm_backward(x, x, weight)
    assert all(isinstance(one, FakeTensor) for one in (dx, dweight, dbias))
    assert dx.shape == x.shape and dweight.shape == dbias.shape == weight.shape


def llama(transformers):
    small = {"vocab_size": 64, "hidden_size": SIZE, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=2, **small)
    return transformers.LlamaForCausalLM, config


def gpt2(transformers):
    config = transformers.GPT2Config(vocab_size=64, n_embd=SIZE, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel, config


@pytest.mark.parametrize("model", [llama, pytest.param(gpt2, marks=pytest.mark.thorough)])
def test_a_patched_model_compiles_without_a_break(model):
    kind, config = model(pytest.importorskip("transformers"))
    config._attn_implementation = "eager"
    model = kind(config).eval()
    patched = transformer_rtc.torch.patch(model)
    assert len(patched.swapped) == 5 + 2  # norms, and gated MLPs or activations
    tokens = torch.randint(64, (2, 6))
    expected = model(tokens, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    norms = {name: one for name, one in model.named_parameters() if "norm" in name or "ln_" in name}
    assert len(norms) >= 5 and all(one.grad is not None and one.grad.isfinite().all() for one in norms.values())
