# SPDX-License-Identifier: Apache-2.0
"""Calls that select dimensions: what they refuse, what of them is viewed, and that other calls pay nothing for it."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transformer_rtc import (
    SimulatedDevice,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
    using,
)
from transformer_rtc.arguments import Dimension, Input, Output, Result, RowShape
from transformer_rtc.declaration import Declaration, declarations
from transformer_rtc.errors import ArgumentError
from transformer_rtc.ops.softmax import api
from transformer_rtc.spec import FLOAT32
from transformer_rtc.views import viewed


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def by_columns(*shape: int) -> np.ndarray:
    """Return an array whose dimension before the last is that of elements next to each other."""
    return np.swapaxes(ones(*shape[:-2], shape[-1], shape[-2]), -1, -2)


class OfNobody:
    """An array of a package that is not known, without views."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> object:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **_: object) -> object:
        return self.array.__dlpack__()


class WithoutStrides(OfNobody):
    """An array as JAX's are: it tells no strides, and has no gaps."""

    __module__ = "jaxlib.xla"

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(np.ascontiguousarray(array))
        self.shape, self.ndim = array.shape, array.ndim

    def devices(self) -> set[str]:
        return {"the host"}

    def transpose(self, axes: tuple[int, ...]) -> WithoutStrides:
        return WithoutStrides(self.array.transpose(axes))

    def reshape(self, shape: tuple[int, ...]) -> WithoutStrides:
        return WithoutStrides(self.array.reshape(shape))


WAY = re.escape("call np.moveaxis(softmax(np.ascontiguousarray(np.moveaxis(x, 1, -1))), -1, 1), without dim")
X = by_columns(2, 3, 4)
GAPS = by_columns(4, 3, 4, 5)[::2].transpose(0, 2, 1, 3)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: softmax(ones(2, 3, 4), dim=1),
     rf"softmax: dim=1: its elements are not next to each other in x, whose strides are \(48, 16, 4\) bytes: {WAY}$"),
    (lambda: softmax(ones(2, 3, 4), dim=-2), f"softmax: dim=-2: .*: {WAY}$"),
    (lambda: softmax(np.broadcast_to(ones(1), (2, 3, 4)), dim=1), r"softmax: dim=1: .* \(0, 0, 0\) bytes: "),
    (lambda: softmax(X[:, ::-1], dim=1), r"softmax: dim=1: .*, whose strides are \(48, -4, 12\) bytes: "),
    (lambda: softmax(ones(2, 3, 4, 5, 6)[:, :2, :3].transpose(2, 4, 0, 1, 3)[..., ::2], dim=1),
     r"softmax: dim=1: the other dimensions of x must collapse to at most two strides; .* are \(.*\) bytes: call "),
    (lambda: softmax(ones(5, 2, 3, 4).transpose(1, 3, 2, 0), dim=1, out=GAPS),
     "softmax: dim=1: the other dimensions of x and out must collapse to at most two strides; "),
    (lambda: softmax(X, dim=1, out=ones(2, 3, 4)),
     "softmax: dim=1: its elements are not next to each other in out, .*: leave it out, or pass one that lies"),
    (lambda: softmax(X, dim=1, out=ones(3, 4)),
     r"softmax: dim=1: out must have the shape of x, \(2, 3, 4\); it has \(3, 4\)"),
    (lambda: softmax_backward(X, by_columns(2, 3, 5), dim=1), "softmax_backward: dim=1: y must have the shape of dy, "),
    (lambda: softmax(X, dim=1, mask=ones(4)),
     r"softmax: dim=1: mask must have this dimension; its shape is \(4,\)"),
    (lambda: softmax(X, dim=1, mask=ones(3, 4)),
     r"softmax: dim=1: .* in mask, .*: call .*moveaxis\(x, 1, -1\)\), mask=np.*\(mask, 0, -1\)\)\), -1"),
    (lambda: softmax(ones(2, 3, 4), dim=1, return_lse=True),
     r"softmax: dim=1: .*: call softmax\(np\.[^=]*\) without dim, and move the results back$"),
    (lambda: softmax_backward(ones(2, 3, 4), ones(2, 3, 4), lse=ones(2, 4), dim=1),
     r"softmax_backward: .*moveaxis\(dy, 1, -1\)\), .*moveaxis\(y, 1, -1\)\), lse=lse\), -1, 1\), without dim$"),
    (lambda: layer_norm(ones(2, 3, 4), (3, 4), ones(3, 4)),
     r"layer_norm: weight must be an array; it is \(3, 4\): the shape of a row is normalized_shape=\(3, 4\)$"),
    (lambda: rms_norm(ones(2, 4), 4), "rms_norm: weight must be an array; it is 4: .* is normalized_shape=4$"),
    (lambda: layer_norm((2, 3, 4)), "layer_norm: x must be an array .*; it is a builtins.tuple$"),
    (lambda: softmax(X, dim=1, mask=by_columns(3, 5)),
     r"softmax: mask must have the shape of x, \(2, 4, 3\), .* it has \(5, 3\) \(dim=1: arrays are seen with it "),
    (lambda: softmax(X, dim=1, mask=by_columns(1, 4)), r"softmax: mask must have the shape .* \(4, 1\) \(dim=1: "),
    (lambda: softmax(X, dim=1, causal="aligned"), "softmax: causal needs rows in the last dimension; dim is 1$"),
    (lambda: softmax(X, dim=0, window=3), "softmax: window needs rows in the last dimension; dim is 0$"),
    (lambda: softmax(X, dim=-2, sink=ones(2)), "softmax: sink needs rows in the last dimension; dim is -2$"),
    (lambda: softmax([1.0], dim=1), "softmax: x must be an array of torch, CuPy, JAX or numpy where dim is .*list$"),
    (lambda: softmax(OfNobody(X), dim=1), "softmax: x must be an array of torch, .*; it is a .*OfNobody$"),
    (lambda: softmax(WithoutStrides(X), dim=1), "softmax: x must be an array of torch, .*; it is a jaxlib.xla.Without"),
    (lambda: softmax(np.float32, dim=1), "softmax: x must be an array of torch, "),
    (lambda: softmax(X, dim=1, mask=1.5), "softmax: mask must be an array of torch, .*; it is a builtins.float$"),
    (lambda: softmax(None, dim=0), "softmax: x must be an array; it is None$"),
    (lambda: softmax(ones(), dim=0), "softmax: x must have at least one dimension; it is a scalar$"),
    (lambda: softmax(X.astype(np.float64), dim=1), r"softmax: x must be one of .* is float64 \(dim=1: arrays "),
    (lambda: softmax(X, dim=1, scale="1"), "softmax: scale must be a real number; it is of type str$"),
    (lambda: softmax(X, dim=1, return_lse=2), "softmax: return_lse must be True or False; it is 2$"),
    (lambda: softmax(X, dim=1, return_lse=ones(2)), "softmax: return_lse must be True or False; it is array"),
    (lambda: softmax(ones(1, 2, 0, 3), dim=-2), "softmax: x must have 1 to .* it has 0 "),
    (lambda: rms_norm(by_columns(2, 3, 4), normalized_shape=(3, 4)),
     r"rms_norm: normalized_shape=\(3, 4\): these dimensions of x must lie in memory as one; its strides are "
     r"\(48, 4, 12\) bytes: pass ascontiguousarray\(x\)$"),
    (lambda: rms_norm(ones(2, 3, 8)[..., ::2], normalized_shape=(3, 4)), "rms_norm: .* must lie in memory as one; "),
    (lambda: rms_norm(ones(2, 3, 8)[..., :4], normalized_shape=(3, 4)), "rms_norm: .* must lie in memory as one; "),
    (lambda: rms_norm(ones(2, 3, 4), ones(12), normalized_shape=(3, 4)),
     r"rms_norm: normalized_shape=\(3, 4\): weight must have this shape; it has \(12,\)$"),
    (lambda: rms_norm(ones(2, 3, 4), ones(4, 3).T, normalized_shape=(3, 4)), "rms_norm: .* of weight must lie"),
    (lambda: layer_norm(ones(2, 3, 4), ones(3, 4), ones(4), normalized_shape=[3, 4]),
     r"layer_norm: normalized_shape=\[3, 4\]: bias must have this shape; it has \(4,\)$"),
    (lambda: rms_norm(ones(2, 3, 4), ones(3, 4), normalized_shape=4),
     r"rms_norm: normalized_shape=4: weight must have this shape; it has \(3, 4\)$"),
    (lambda: add_rms_norm(ones(2, 3, 4), ones(2, 12), normalized_shape=(3, 4)),
     r"add_rms_norm: .*: residual must have the shape of x, \(2, 3, 4\); it has \(2, 12\)$"),
    (lambda: rms_norm(ones(2, 3, 4), normalized_shape=(3, 4), out=by_columns(2, 3, 4)),
     "rms_norm: .*: these dimensions of out must lie in memory as one; .*: leave it out, or pass a contiguous one$"),
    (lambda: rms_norm_backward(ones(2, 3, 4), ones(2, 3, 4), rstd=ones(2, 3), normalized_shape=(3, 4)),
     r"rms_norm_backward: rstd must have the shape \(2,\).* it has \(2, 3\) \(normalized_shape=\(3, 4\): arrays "),
    (lambda: rms_norm(ones(2, 3, 4), eps=-1, normalized_shape=(3, 4)), "rms_norm: eps must not be negative; it is -1$"),
]  # fmt: skip


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_no_view_gives_is_refused_with_the_way(number):
    call, message = REFUSED[number]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call()


def recorder(declaration: Declaration) -> tuple[Callable[..., Any], list[Any]]:
    """Return the viewed call of a native one that keeps what it is given."""
    given: list[Any] = []
    return viewed(declaration, lambda *values: given.extend(values)), given


@pytest.mark.parametrize("dim", [-1, 2, np.int64(-1), np.int32(2)], ids=repr)
def test_the_last_dimension_is_passed_on_as_it_is(dim):
    call, given = recorder(declarations()["softmax"])
    values = [ones(2, 3, 4), 1.0, ones(4), False, "aligned", 2, ones(3), None, None, False, None]
    call(dim, *values)
    assert len(given) == len(values) and all(one is other for one, other in zip(given, values, strict=True))


def test_a_call_that_selects_nothing_is_the_native_one(monkeypatch):
    def fail(*_: object) -> None:
        pytest.fail("it was viewed")

    monkeypatch.setattr(api, "_softmax_viewed", fail)
    with using(SimulatedDevice(static=True)):
        assert softmax(ones(2, 4)).shape == softmax(ones(2, 4), dim=-1).shape == (2, 4)
    with pytest.raises(pytest.fail.Exception, match="it was viewed"):
        softmax(ones(2, 4), dim=1)


def test_one_dimension_by_its_shape_is_the_last_one():
    x, weight = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32), ones(4)
    with using(SimulatedDevice(static=True)):
        for shape in (4, (4,), [4], np.int64(4)):
            assert (rms_norm(x, weight, normalized_shape=shape) == rms_norm(x, weight)).all()
        per_head = rms_norm(x, ones(3, 4) * 2)  # a weight for each head, where no shape is given
        assert (per_head == 2 * rms_norm(x)).all()


def test_an_array_that_tells_no_strides_is_viewed_where_it_has_no_gaps(monkeypatch):
    jax = types.SimpleNamespace(Array=WithoutStrides, device_put=lambda array, _: WithoutStrides(array))
    jax.core = types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    monkeypatch.setitem(sys.modules, "jax", jax)
    x = np.random.default_rng(1).standard_normal((2, 12)).astype(np.float32)
    with using(SimulatedDevice(static=True)):
        y, lse = softmax(WithoutStrides(x[..., None]), dim=1, return_lse=True)
        normal = rms_norm(WithoutStrides(x.reshape(2, 3, 4)), WithoutStrides(ones(3, 4)), normalized_shape=(3, 4))
        assert (y.shape, lse.shape, normal.shape) == ((2, 12, 1), (2, 1), (2, 3, 4))
        assert (y.array[..., 0] == softmax(x)).all() and (lse.array[..., 0] == softmax(x, return_lse=True)[1]).all()
        assert (normal.array.reshape(2, 12) == rms_norm(x)).all()
        way = re.escape("call jnp.moveaxis(softmax(jnp.moveaxis(x, 1, -1)), -1, 1), without dim")
        with pytest.raises(ArgumentError, match=rf"^softmax: dim=1: .* are \(12, 4, 1\) elements: {way}$"):
            softmax(WithoutStrides(ones(2, 3, 4)), dim=1)


def test_what_is_viewed_is_read_from_the_declaration():
    arrays = (
        Input("first", "... inner row", (FLOAT32,)),
        Input("shared", "row | inner row", (FLOAT32,), optional=True),
        Input("scalar", "() | 1", (FLOAT32,), optional=True),
        Output("second", "... row", (FLOAT32,)),
        Result("count", "...", (FLOAT32,)),
    )
    first = ones(3, 4, 5)
    by_dim = Declaration("op", None, arrays, positional=("first",), selector=Dimension("axis"))  # type: ignore[arg-type]
    moved = np.swapaxes(first, 1, 2)
    call = viewed(by_dim, lambda *given: (given[0], given[0][..., 0]))
    found, count = call(1, moved, None, None, None, True)
    assert found.strides == moved.strides and found.shape == (3, 5, 4) and count.shape == (3, 4)
    with pytest.raises(ArgumentError, match=r"^op: shared needs rows in the last dimension; axis is 1$"):
        call(1, moved, ones(5), None, None, True)
    by_shape = Declaration("op", None, arrays, positional=("first",), selector=RowShape("tail"))  # type: ignore[arg-type]
    given: list[Any] = []
    assert (
        viewed(by_shape, lambda *values: given.extend(values) or values[3])(
            (4, 5), first, ones(4, 5), scalar := ones(1), out := ones(3, 4, 5), False
        )
        is out
    )
    assert [one.shape for one in given[:2]] == [(3, 20), (20,)] and given[2] is scalar and given[3].shape == (3, 20)
    assert given[3].base is out and np.shares_memory(given[0], first)
