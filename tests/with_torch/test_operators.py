"""The operators of torch: what torch's own checker says of each, and that they are the public functions."""

from __future__ import annotations

import random
from typing import Any

import kernel_cache
import pytest

import transformer_rtc
from transformer_rtc import operator, using
from transformer_rtc.arguments import Choice, Flag, Input, Integer, OutputDType, OutputWanted, Result, Update
from transformer_rtc.declaration import Declaration, declarations
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
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
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    torch.manual_seed(5)
    with using("simulator"):
        yield


def shape_of(declaration: Declaration, array: Any, leading: tuple[int, ...], heads: bool) -> tuple[int, ...] | None:
    """Return the shape of an array beside rows [*leading, LAST]; None: there is none beside so few dimensions."""
    shapes = declaration.shapes(array)
    shape = shapes[heads and declaration.has_two_shapes(array)]
    sizes = dict(zip(declaration.symbols, (LAST, *reversed(leading)), strict=False))
    if any(size.symbol not in ("", *sizes) for size in shape.sizes):
        return None
    named = tuple(size.multiple * sizes[size.symbol] if size.symbol else size.multiple for size in shape.sizes)
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
            shape = shape_of(declaration, argument, leading, kind == "flags")
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
    # Some arrays must be given, though perhaps as None.
    names = {one.name: one.keyword for one in declaration.arguments}
    return {names[name]: None for name in declaration.always} | given


def kinds(name: str) -> list[str]:
    has_updates = any(isinstance(argument, Update) for argument in declarations()[name].arguments)
    return ["required", "all", "flags", *(["float8", "int8"] if has_updates else [])]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NAMES for kind in kinds(name)])
def test_torch_finds_no_fault(name, kind):
    given = sample(name, kind)
    torch.library.opcheck(overload(name), (), given)
    if declarations()[name].gradient and kind in ("required", "all", "flags"):
        given = {
            key: one.requires_grad_() if getattr(one, "dtype", None) == torch.float32 else one
            for key, one in given.items()
        }
        torch.library.opcheck(overload(name), (), given)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_the_public_signature(name):
    assert str(overload(name)._schema) == f"transformer_rtc::{SCHEMAS[name]}"


@pytest.mark.parametrize("leading", [(), (1,), (0,), (7,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_fake_is_like_what_is_real(name, leading):
    from torch._subclasses.fake_tensor import FakeTensorMode

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
