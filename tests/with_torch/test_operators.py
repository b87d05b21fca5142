# SPDX-License-Identifier: Apache-2.0
"""The operators of torch: what torch's own checker says of each, and that they are the public functions."""

from __future__ import annotations

import os
import random
from collections.abc import Container
from typing import Any

import fuzzed_calls
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import given as drawn

import transformer_rtc
from transformer_rtc import SimulatedDevice, using
from transformer_rtc.arguments import (
    Choice,
    Flag,
    Input,
    Integer,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
    Stream,
    Update,
)
from transformer_rtc.declaration import Declaration, declarations
from transformer_rtc.errors import ArgumentError, TransformerRtcError

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from transformer_rtc.torch.operators import overload  # noqa: E402

NAMES = list(declarations())
LAST = 40
SCHEMAS = {
    "rms_norm": "rms_norm(Tensor x, Tensor? weight=None, float eps=9.9999999999999995e-07, Tensor? bias=None, "
    "float weight_offset=0., ScalarType? out_dtype=None, bool round_before_weight=False, bool return_rstd=False, "
    "Tensor? scale=None, Tensor? amax=None, Tensor? scale_inv=None, bool row_scaling=False, int sm_margin=0) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "softmax_backward": "softmax_backward(Tensor dy, Tensor y, float scale=1., str? causal=None, SymInt? window=None, "
    "Tensor? sink=None, Tensor? lse=None, Tensor? mask=None, ScalarType? out_dtype=None, bool? return_dsink=None, "
    "bool? return_dmask=None) -> (Tensor, Tensor, Tensor)",
}


@pytest.fixture(autouse=True)
def simulator():
    torch.manual_seed(5)
    with using(SimulatedDevice(static=True)):  # no kernel is compiled for a sample
        yield


def shape_of(
    declaration: Declaration, array: Any, leading: tuple[int, ...], heads: bool, given: Container[str] = ()
) -> tuple[int, ...] | None:
    """Return the shape of an array beside rows [*leading, LAST]; None: there is none beside so few dimensions."""
    shapes = declaration.shapes(array)
    shape = shapes[heads and declaration.has_two_shapes(array)]
    sizes = dict(zip(declaration.symbols, (LAST, *reversed(leading)), strict=False))
    if any(size.symbol not in ("", *sizes) for size in shape.sizes):
        return None
    named = tuple(declaration.parts(size, given) * sizes.get(size.symbol, 1) for size in shape.sizes)
    return (*leading, *named) if shape.leading else named


def sample(name: str, kind: str, leading: tuple[int, ...] = (2, 3, 5)) -> dict[str, Any]:
    """Return arguments of an operator by name.

    Kinds: "required", what must be given alone; "all", every array, result and number; "flags", with flags and masks of
    bools, and a weight of each head; "float8" and "int8", what outputs of 8 bits have.
    """
    declaration = declarations()[name]
    given: dict[str, Any] = {}
    few = kind in ("required", "float8", "int8")
    for argument in declaration.arguments:
        key = argument.keyword
        if isinstance(argument, Input) and (not argument.optional or not few or (kind, key) == ("float8", "scale")):
            if argument.optional and key == "scale" and kind != "float8":
                continue
            dtypes = [dtype.name for dtype in argument.dtypes]
            split = () if few else (declaration.split_by,)
            shape = shape_of(declaration, argument, leading, kind == "flags", split)
            if shape is None:
                continue
            made = torch.rand(shape) + 0.5
            given[key] = made > 0.8 if kind == "flags" and "bool" in dtypes and "backward" not in name else made
        elif isinstance(argument, Update) and kind == "float8":
            given[key] = torch.zeros(1)
        elif isinstance(argument, Result) and not few:
            given[key] = key != "row_scaling" and (kind == "all" or key != "return_dmask")
        elif isinstance(argument, Result) and kind == "int8" and key == "row_scaling":
            given[key] = True
        elif isinstance(argument, OutputDType) and kind == "all":
            given[key] = torch.bfloat16
        elif isinstance(argument, OutputDType) and kind in ("float8", "int8") and key == "out_dtype":
            given[key] = torch.float8_e4m3fn if kind == "float8" else torch.int8
        elif isinstance(argument, OutputWanted) and kind == "flags":
            given[key] = False
        elif isinstance(argument, Flag) and kind == "flags":
            given[key] = True
        elif isinstance(argument, Choice) and not few:
            given[key] = list(argument.words)[-1]
        elif isinstance(argument, Integer) and not few:
            given[key] = 3
        elif isinstance(argument, Real) and not few:
            given[key] = 0.25
        elif isinstance(argument, Margin) and kind == "all":
            given[key] = 2
    # Some arrays must be given, though perhaps as None.
    names = {one.name: one.keyword for one in declaration.arguments}
    return {names[name]: None for name in declaration.always} | given


def kinds(name: str) -> list[str]:
    has_updates = any(isinstance(argument, Update) for argument in declarations()[name].arguments)
    return ["required", "all", "flags", *(["float8", "int8"] if has_updates else [])]


@pytest.mark.parametrize(("name", "kind"), [
    pytest.param(name, kind, marks=[] if kind == "all" or "rms_norm" in name else pytest.mark.thorough(share=0.3))
    for name in NAMES for kind in kinds(name)
])  # fmt: skip
def test_torch_finds_no_fault(name, kind):
    given = sample(name, kind)
    if declarations()[name].gradient and kind in ("required", "all", "flags"):
        given = {
            key: one.requires_grad_() if getattr(one, "dtype", None) == torch.float32 else one
            for key, one in given.items()
        }
    torch.library.opcheck(overload(name), (), given)


@pytest.mark.parametrize("name", NAMES)
def test_samples_use_every_argument_and_every_result(name):
    arguments = declarations()[name].arguments
    default = {one.keyword: None if one.default is ... else one.default for one in arguments}
    used = {
        key for kind in kinds(name) for key, value in sample(name, kind).items() if value is not default.get(key, value)
    }
    used |= {key for kind in kinds(name) for key, value in sample(name, kind).items() if torch.is_tensor(value)}
    assert used == {one.keyword for one in arguments if not isinstance(one, (Output, Stream))}
    made = [overload(name)(**sample(name, kind)) for kind in kinds(name)]
    made = [one if isinstance(one, tuple) else (one,) for one in made]
    assert all(any(one.numel() for one in each) for each in zip(*made, strict=True))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_the_public_signature(name):
    assert str(overload(name)._schema) == f"transformer_rtc::{SCHEMAS[name]}"


@pytest.mark.parametrize("leading", [(), (1,), (0,), (7,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_fake_is_like_what_is_real(name, leading):
    draw = random.Random(str((name, leading)))
    for _ in range(6):
        # Any part of what may be given; what is refused is refused by the call.
        given = sample(name, draw.choice(["all", "required", "flags"]), leading or (4,))
        optional = [one.keyword for one in declarations()[name].arguments if not isinstance(one, Input) or one.optional]
        optional = [key for key in optional if key in given and given[key] is not None]
        kept = {key: one for key, one in given.items() if key not in optional or draw.random() < 0.6}
        given = sample(name, "required", leading or (4,)) | kept
        if not leading:
            given = {
                key: one[0] if getattr(one, "ndim", 0) and one.shape[:1] == (4,) else one for key, one in given.items()
            }
        try:
            real = overload(name)(**given)
        except ArgumentError:
            continue
        with FakeTensorMode() as mode:
            fakes = {key: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for key, one in given.items()}
            fake = overload(name)(**fakes)
        for one, other in zip(
            *(found if isinstance(found, tuple) else (found,) for found in (real, fake)), strict=True
        ):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), given


@pytest.mark.parametrize("name", NAMES)
def test_the_public_function_returns_what_the_operator_does(name):
    for kind in kinds(name):
        given = sample(name, kind)
        before = {key: one.clone() for key, one in given.items() if isinstance(one, torch.Tensor)}
        made = overload(name)(**given)
        made = [one for one in (made if isinstance(made, tuple) else (made,)) if one.numel()]
        assert all(given[key].equal(one) for key, one in before.items())  # it writes nothing
        updated = {key: one.clone() for key, one in before.items()}
        found = getattr(transformer_rtc, name)(**(given | updated))
        found = list(found) if isinstance(found, tuple) else [found]
        # What is updated stands among what an operator returns, behind its outputs.
        changed = [
            updated[one.keyword]
            for one in declarations()[name].arguments
            if isinstance(one, Update) and one.keyword in given
        ]
        outputs = len(found) - sum(
            bool(given.get(one.keyword)) for one in declarations()[name].arguments if isinstance(one, Result)
        )
        expected = made if not changed else [*made[:outputs], *made[outputs + len(changed) :]]
        assert len(found) == len(expected)
        for one, other in zip(found + changed, expected + made[outputs : outputs + len(changed)], strict=True):
            assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# ---- Any call --------------------------------------------------------------------------------------------------------


class Passes(TorchDispatchMode):
    """A mode that sees operators, and does nothing with them: the public functions dispatch within it."""

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        return operator(*arguments, **(keywords or {}))


def tensor_of(array: np.ndarray) -> Any:
    plain = array.view(np.uint8 if array.dtype == np.bool_ else f"i{array.itemsize}")  # torch knows no ml_dtypes
    return torch.from_numpy(plain).view(getattr(torch, array.dtype.name))


def tensors_of(call: fuzzed_calls.Call) -> dict[str, Any]:
    """Return a call's arguments as tensors in memory of their own, which overlap as the arrays do."""
    bases: dict[int, np.ndarray] = {}
    given = dict(call.given)
    for name, place in call.placed.items():
        base = bases.setdefault(id(place), place.base.copy())
        first, own = (one.__array_interface__["data"][0] for one in (place.array, call.given[name]))
        given[name] = tensor_of(place.view_of(base, (own - first) // place.base.itemsize))
    return given


def bits(tensor: Any) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return bytes(plain.view(getattr(torch, f"uint{8 * plain.itemsize}")).numpy().tobytes()) if plain.numel() else b""


def tuple_of(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def same(found: Any, expected: Any, call: fuzzed_calls.Call) -> None:
    """Hold tensors to be the same bits at the same strides."""
    for one, other in zip(tuple_of(found), tuple_of(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride(), call
        assert bits(one) == bits(other), call


def hold(count: int, check: Any) -> None:
    """Check so many calls, of which some are wrong; those with strides that no tensor has are left out."""
    seen = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @drawn(fuzzed_calls.calls())
    def one(call: fuzzed_calls.Call) -> None:
        if all(min(one.array.strides, default=0) >= 0 for one in call.placed.values()):
            seen.append(check(call))

    one()
    assert sum(map(bool, seen)) > count // 5


COUNTS = [100, pytest.param(int(os.environ.get("FUZZED_CALLS", "1000")), marks=pytest.mark.thorough, id="many")]


@pytest.mark.parametrize("count", COUNTS)
def test_a_call_that_is_dispatched_is_the_native_one(count):
    def check(call: fuzzed_calls.Call) -> bool:
        function, native, dispatched = getattr(transformer_rtc, call.name), tensors_of(call), tensors_of(call)
        with FakeTensorMode() as mode:
            fakes = {
                key: mode.from_tensor(one) if torch.is_tensor(one) else one for key, one in tensors_of(call).items()
            }
        try:
            expected = function(**native)
        except TransformerRtcError:
            return False
        with Passes():
            same(function(**dispatched), expected, call)
        written = [key for key, one in native.items() if torch.is_tensor(one)]
        same(tuple(dispatched[key] for key in written), tuple(native[key] for key in written), call)
        for one, other in zip(tuple_of(function(**fakes)), tuple_of(expected), strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), call
        return True

    hold(count, check)


@pytest.mark.parametrize("count", COUNTS)
def test_a_gradient_that_is_dispatched_is_the_native_one(count):
    floats = (torch.float32, torch.float16, torch.bfloat16)

    def gradients(call: fuzzed_calls.Call, seed: int) -> Any:
        draw = random.Random(seed)
        given = {key: one for key, one in tensors_of(call).items() if "out" not in key or "dtype" in key}
        leaves = [one for one in given.values() if torch.is_tensor(one) and one.dtype in floats and draw.random() < 0.7]
        for one in leaves:
            one.requires_grad_()
        found = tuple_of(getattr(transformer_rtc, call.name)(**given))
        used = [one for one in found if one.requires_grad and draw.random() < 0.8]
        torch.manual_seed(seed)
        dys = [torch.randn(one.shape).to(one.dtype) for one in used]
        made = torch.autograd.grad(used, leaves, dys, allow_unused=True) if used else []
        # What is not there stands for itself.
        return [one.requires_grad for one in found], [torch.empty(0) if one is None else one for one in made]

    def check(call: fuzzed_calls.Call) -> bool:
        if call.name.endswith("backward"):
            return True
        seed = sum(place.base.size for place in call.placed.values())  # any, the same for the same call
        try:
            expected = gradients(call, seed)
        except TransformerRtcError as error:
            with pytest.raises(type(error)), Passes():
                gradients(call, seed)
            return False
        with Passes():
            found = gradients(call, seed)
        assert found[0] == expected[0], call
        same(tuple(found[1]), tuple(expected[1]), call)
        return True

    hold(count, check)
