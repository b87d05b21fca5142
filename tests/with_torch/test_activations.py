"""Activations in torch: gradients, the modules, and the swap of those that a model has."""

from __future__ import annotations

import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, using

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402


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


def hold(found, exact, inputs, dtype) -> None:
    """Hold a result and gradients to those of float64."""
    near = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near)
    gradient = torch.randn(found.shape).to(dtype)
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    return gradient, doubles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64(name, dtype):
    function, options = CASES[name]
    x = leaf(4, 37, dtype=dtype)
    y = getattr(transformer_rtc, name.split()[0])(x, **options)
    double = x.detach().double().requires_grad_()
    exact = function(double)
    gradient, _ = hold(y, exact, [x], dtype)
    y.backward(gradient)
    exact.backward(gradient.double())
    near = 2e-6 if dtype == torch.float32 else 2e-2
    assert x.grad.dtype == dtype
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
