# SPDX-License-Identifier: Apache-2.0
"""Addition in torch: types, gradients, compiled code, vmap and DTensors, as torch's own."""

from __future__ import annotations

import itertools

import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, using

torch = pytest.importorskip("torch")

ADD = transformer_rtc.add
# Of torch, those of which it has sums on a CPU.
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
# Shapes of x and of the other tensor: alike, broadcast along rows, along columns and along both.
SHAPES = (((3, 8), (3, 8)), ((3, 5), (5,)), ((3, 1), (1, 5)), ((5,), (2, 3, 5)), ((2, 1, 4), (3, 1)))


@pytest.fixture(autouse=True)
def simulator():
    torch.manual_seed(3)
    with using(SimulatedDevice()):
        yield


def numbers(shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("scalar", [None, 0, 1])
def test_types_are_promoted_as_torch_does(scalar):
    for pair in itertools.product(DTYPES, repeat=2):
        given = [numbers(() if scalar == number else (3,), dtype) for number, dtype in enumerate(pair)]
        found, wanted = ADD(*given), torch.add(*given)
        assert found.dtype == wanted.dtype, pair
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_types_are_promoted_as_torch_does(dtype):
    x = torch.tensor([1, 2, 3]).to(dtype)
    for other in (*DTYPES, torch.uint16, torch.uint32, torch.uint64):
        given = x, torch.tensor([1, 0, 1]).to(other)
        try:
            wanted = torch.promote_types(dtype, other)
        except RuntimeError:
            with pytest.raises(transformer_rtc.ArgumentError, match="promotes to no type"):
                ADD(*given)
            wanted = torch.int64
        found = ADD(*given, out_dtype=wanted)
        assert found.dtype == wanted and found.tolist() == [2, 2, 4]


@pytest.mark.parametrize(("x_shape", "other_shape"), SHAPES)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2])
def test_gradients_are_torchs(x_shape, other_shape, dtypes):
    given = [torch.randn(shape).to(dtype) for shape, dtype in zip((x_shape, other_shape), dtypes, strict=True)]
    ours, theirs = ([one.clone().requires_grad_() for one in given] for _ in range(2))
    y, wanted = ADD(*ours), torch.add(*theirs)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    wanted.backward(gradient)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad.dtype == one.dtype
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_one_input_alone_may_need_a_gradient_and_that_one_may_be_differentiated():
    x, ints = torch.randn(3, 4, requires_grad=True), torch.arange(4)
    (first,) = torch.autograd.grad((ADD(x, ints) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * (x.detach() + ints))
    assert torch.autograd.gradcheck(lambda one, two: ADD(one, two), (x, torch.randn(4, requires_grad=True)), eps=1e-2,
                                    atol=1e-2, rtol=1e-2)  # fmt: skip
    with pytest.raises(transformer_rtc.ArgumentError, match="out is written in place, which records no gradient"):
        ADD(x, ints, out=torch.empty(3, 4))


@pytest.mark.parametrize(("x_shape", "other_shape"), SHAPES)
def test_compiled_code_has_the_operator(x_shape, other_shape):
    def function(x, other):
        return ADD(x, other) * 2

    x, other = torch.randn(x_shape).requires_grad_(), torch.randn(other_shape).to(torch.bfloat16)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    found, wanted = compiled(x, other), function(x, other)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    (one,) = torch.autograd.grad(found.sum(), x)
    (two,) = torch.autograd.grad(wanted.sum(), x)
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_compiled_code_refuses_two_numbers():
    compiled = torch.compile(lambda one, two: ADD(one, two), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="x must have at least one dimension; it is a scalar"):
        compiled(torch.tensor(1.0), torch.tensor(1.0))


def test_fakes_say_what_calls_return():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for (x_shape, other_shape), (x_dtype, other_dtype) in itertools.product(
        SHAPES, ((torch.int8, torch.uint8), (torch.float16, torch.bfloat16), (torch.bool, torch.int64))
    ):
        found = ADD(numbers(x_shape, x_dtype), numbers(other_shape, other_dtype))
        with FakeTensorMode():
            fake = ADD(torch.empty(x_shape, dtype=x_dtype), torch.empty(other_shape, dtype=other_dtype))
        assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


@pytest.mark.parametrize(("x_shape", "other_shape"), SHAPES)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_vmap(x_shape, other_shape, in_dims):
    shapes = [list(x_shape), list(other_shape)]
    for shape, dim in zip(shapes, in_dims, strict=True):
        if dim is not None:
            shape.insert(dim, 6)
    given = [torch.randn(shape) for shape in shapes]
    found, wanted = (torch.vmap(function, in_dims)(*given) for function in (ADD, torch.add))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_vmap_of_numbers_keeps_their_types():
    x, other = torch.randn(6).to(torch.bfloat16), torch.randn(6, 4).to(torch.float16)
    for given in ((x, other), (x.to(torch.int8), other), (x, other.to(torch.int8))):
        found, wanted = (torch.vmap(function)(*given) for function in (ADD, torch.add))
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_gradients_of_functions():
    x, other = torch.randn(3, 5), torch.randn(5)
    ours, theirs = (
        torch.func.grad(lambda x, other, add=add: (add(x, other) ** 2).sum(), argnums=(0, 1))(x, other)
        for add in (ADD, torch.add)
    )
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two)
