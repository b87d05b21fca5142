# SPDX-License-Identifier: Apache-2.0
"""Calls of the operators with arrays of any layout, types and values that hypothesis draws, good and bad ones.

Each must end in an error of ours, with nothing written, or in what float64 gives, with nothing written elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import reference
import softmax_reference
from activation_checks import Kind, expected_of, gradients_of
from bad_values import FUNCTIONS, parameters_of, refused_by
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import NUMPY_TYPES, Expected

from transformer_rtc.declaration import declarations
from transformer_rtc.errors import TransformerRtcError
from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8, DType

FLOATS = [NUMPY_TYPES[dtype] for dtype in (FLOAT32, FLOAT16, BFLOAT16)]
DTYPES = {NUMPY_TYPES[dtype]: dtype for dtype in (FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, INT8)}
COLUMNS = [1, 2, 7, 8, 16, 17, 40, 64, 65, 130, 300]
LAYOUTS = ["dense"] * 12 + ["padded", "offset", "gap", "reversed", "broadcast", "permuted", "overlapping", "strided"]
ROWS = ("x", "dy", "y", "s", "ds", "residual", "dresidual", "up")
OUTPUTS = ("out", "residual_out")
# Of each function of a family that there is a reference of.
FAMILIES = {
    name: family
    for name, declaration in declarations().items()
    if (family := declaration.family.name) in ("norms", "softmax", "activations")
}
GUARD = 64  # elements on either side


class Placed:
    """An array of some layout in memory of its own, which must not change around it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], layout: str, amount: int) -> None:
        strides = _strides(shape, layout, amount)
        ways = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True) if extent]
        low = -sum(min(0, way) for way in ways)
        self.base = np.zeros(2 * GUARD + low + sum(max(0, way) for way in ways) + 1 + amount, dtype)
        self._start = GUARD + low + (amount if layout == "offset" else 0)
        self._shape, self._strides = shape, strides
        self.array = self.view_of(self.base)

    def view_of(self, base: np.ndarray, shift: int = 0) -> np.ndarray:
        strides = [stride * base.itemsize for stride in self._strides]
        plain = base.view(f"i{base.itemsize}")  # as_strided does not know every type
        found = np.lib.stride_tricks.as_strided(plain[self._start + shift :], self._shape, strides)
        return found.view(base.dtype)


def _strides(shape: tuple[int, ...], layout: str, amount: int) -> list[int]:
    if not shape:
        return []
    last = 2 if layout == "strided" else 1
    unit = max(1, shape[-1]) * last + (amount if layout == "padded" else 0)
    order = list(range(len(shape) - 1))[::-1]
    if layout == "permuted":
        order = order[::-1]
    strides = [0] * (len(shape) - 1) + [last]
    for dimension in order:
        strides[dimension] = unit
        unit *= max(1, shape[dimension])
    if len(shape) > 1:
        if layout == "gap":
            strides[0] += amount
        elif layout == "reversed":
            strides[0] = -strides[0]
        elif layout == "broadcast":
            strides[0] = 0
        elif layout == "overlapping":
            strides[0] = amount
    return strides


def _values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], special: Sequence[float]
) -> np.ndarray:
    if dtype == np.bool_ or dtype == np.uint8:
        return (rng.random(shape) < 0.4).astype(dtype)
    values = rng.standard_normal(shape, np.float32) * 2.0 ** rng.integers(-4, 4)
    if len(special) and values.size:
        flat = values.reshape(-1)
        flat[rng.integers(0, flat.size, 2)] = rng.choice(special, 2)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def _producer(array: np.ndarray) -> object:
    """Return an array of nobody's, that speaks DLPack."""
    speaks = {
        "__dlpack_device__": lambda _: array.__dlpack_device__(),
        "__dlpack__": lambda *_, **__: array.__dlpack__(),
    }
    return type("Producer", (), {"array": array, **speaks})()


class Call:
    """One call, and what of it may be written."""

    def __init__(self, name: str) -> None:
        self.name, self.softmax = name, FAMILIES[name] == "softmax"
        self.activation = FAMILIES[name] == "activations"
        self.by_dlpack = False
        self.rank = 0  # of arrays of rows
        self.given: dict[str, Any] = {}
        self.placed: dict[str, Placed] = {}

    def __repr__(self) -> str:
        shown = {
            name: f"{value.dtype}{value.shape} strides {value.strides}" if isinstance(value, np.ndarray) else value
            for name, value in self.given.items()
        }
        return f"{self.name}({shown}{', by DLPack' * self.by_dlpack})"

    def make(self) -> object:
        """Make it, and return what it gives."""
        if not self.by_dlpack:
            return FUNCTIONS[self.name](**self.given)
        given = {name: _producer(one) if isinstance(one, np.ndarray) else one for name, one in self.given.items()}
        result = FUNCTIONS[self.name](**given)
        results = [getattr(one, "array", one) for one in _tuple(result)]
        return tuple(results) if isinstance(result, tuple) else results[0]


def _tuple(result: object) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call; in about a third of them some arguments are of the table of bad ones."""
    call = Call(draw(st.sampled_from(sorted(FAMILIES))))
    call.by_dlpack = draw(st.integers(0, 7)) == 7
    parameters = parameters_of(call.name)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    leading = draw(st.lists(st.sampled_from([2, 3, 1, 4, 5, 2, 3, 0]), max_size=4))
    columns = draw(st.sampled_from(COLUMNS))
    if "causal" in parameters and leading and draw(st.booleans()):
        leading[-1] = columns = min(columns, 17)
    shape = (*leading, columns)
    call.rank = len(shape)
    dtype = draw(st.sampled_from(FLOATS))
    # Not both in a row: what softmax makes of -inf in a row of NaN depends on whether there is a mask. And the
    # gradients of rows that are no numbers are any of those that are none.
    special = draw(st.sampled_from([()] * 8 + [(np.nan, np.inf, 0.0), (-np.inf, 0.0)]))
    special = () if "backward" in call.name else special

    def add(name: str, of: tuple[int, ...], types: Sequence[Any], layouts: Sequence[str] = LAYOUTS) -> None:
        kind = np.dtype(draw(st.sampled_from(types)))
        place = Placed(of, kind, draw(st.sampled_from(layouts)), draw(st.integers(0, 9)))
        place.array[...] = _values(rng, of, kind, special)
        call.placed[name], call.given[name] = place, place.array

    mixed = [dtype] * 4 + FLOATS
    # An activation's second factor, or twice as many columns.
    has_up = "up" not in parameters or draw(st.booleans())
    divisors = [number for number in range(1, columns + 1) if columns % number == 0]
    shape_of_x = shape if has_up else (*leading, 2 * columns)
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        if not required and (not has_up if name == "up" else draw(st.integers(0, 2))):
            continue
        if name == "sink" and len(shape) < 3:
            continue
        if name in ROWS:
            add(name, shape_of_x if name == "x" else shape, mixed)
        elif name in ("weight", "bias"):
            heads = shape[-2:] if "weight" in call.given and call.given["weight"].ndim == 2 else shape[-1:]
            if name == "weight" and len(shape) > 1 and draw(st.integers(0, 2)) == 0:
                heads = shape[-2:]
            add(name, heads, mixed, ["dense", "dense", "offset"])
        elif name in ("mean", "rstd", "lse"):
            add(name, shape[:-1], [np.float32], ["dense", "dense", "offset"])
            if name == "rstd":
                with np.errstate(all="ignore"):
                    call.given[name][...] = np.abs(call.given[name]) + np.float32(0.1)
        elif name == "sink":
            add(name, shape[-3:-2], mixed, ["dense", "offset"])
        elif name == "mask":
            broadcast = [1 if draw(st.integers(0, 2)) == 0 else extent for extent in shape[:-1]]
            types = FLOATS if "backward" in call.name else [bool, np.uint8, *FLOATS]
            add(name, (*broadcast, columns)[draw(st.integers(0, len(shape) - 1)) :], types)
        elif (name == "scale" and not call.softmax) or name in ("amax", "scale_inv"):
            add(name, draw(st.sampled_from([(1,), ()])), [np.float32], ["dense", "offset"])
            call.given[name][...] = {"scale": 2.0, "amax": 0.25, "scale_inv": 0.0}[name]
        elif name in OUTPUTS:
            source = call.placed[draw(st.sampled_from([other for other in call.placed if other in ROWS]))]
            where = draw(st.integers(0, 3))
            if where < 2:
                of = shape_of_x if "backward" in call.name else shape
                add(name, of, mixed if call.softmax or "backward" in call.name else [*mixed, *DTYPES])
            else:  # in place, or a few elements behind that
                shift = 0 if where == 2 else draw(st.integers(-GUARD // 2, GUARD // 2))
                call.placed[name] = source
                call.given[name] = source.view_of(source.base, shift)
        elif name in ("out_dtype", "dweight_dtype", "residual_dtype"):
            few = call.softmax or "backward" in call.name or name == "residual_dtype"
            types = [*FLOATS, *(() if few else DTYPES)]
            chosen = draw(st.sampled_from(types))
            call.given[name] = draw(st.sampled_from([chosen, chosen.name, chosen.type]))
        elif name == "causal":
            call.given[name] = draw(st.sampled_from(["aligned", "upper_triangular"]))
        elif name == "dim":
            call.given[name] = draw(st.integers(-len(shape), len(shape) - 1))
        elif name == "normalized_shape":
            first = draw(st.sampled_from(divisors))
            call.given[name] = draw(st.sampled_from([columns, (columns,), (first, columns // first)]))
        elif name == "approximate":
            call.given[name] = "tanh"
        elif name == "window":
            call.given[name] = draw(st.sampled_from([1, 2, 5, np.int64(7), 10**30]))
        elif name == "eps":
            call.given[name] = draw(st.sampled_from([1e-6, 1e-5, 1, np.float32(1e-3), 0.25]))
        elif name in ("weight_offset", "scale"):
            numbers = [0, 1.0, np.float64(0.125), np.float16(1.5), *(() if np.inf in special else (-0.5,))]
            call.given[name] = draw(st.sampled_from(numbers))
        elif name == "sm_margin":
            call.given[name] = draw(st.integers(0, 9))
        elif name == "stream":
            call.given[name] = None
        else:
            call.given[name] = draw(st.sampled_from([True, False, np.True_]))
    if draw(st.integers(0, 4)):
        _make_sensible(call, draw(st.sampled_from([NUMPY_TYPES[FLOAT8_E4M3], NUMPY_TYPES[FLOAT8_E5M2]])))
    for name in call.placed:
        call.given[name] = _selected(call, name, call.given[name])
    for _ in range(max(0, draw(st.integers(-4, 2)))):
        name = draw(st.sampled_from(sorted(parameters)))
        values = refused_by(call.name, name)
        call.given[name] = values[draw(st.integers(0, len(values) - 1))]
        call.placed.pop(name, None)
    return call


def _selected(call: Call, name: str, array: np.ndarray, back: bool = False) -> np.ndarray:
    """Return the view of an array whose last dimension is a row that the call is given, or that view seen back."""
    dim, shape = call.given.get("dim", -1), call.given.get("normalized_shape")
    if name in (*ROWS, *OUTPUTS, "mask", "dmask"):
        dim -= call.rank if dim >= 0 else 0
        array = np.moveaxis(array, *((dim, -1) if back else (-1, dim))) if array.ndim >= -dim else array
    if isinstance(shape, tuple) and name in (*ROWS, *OUTPUTS, "weight", "bias", "dweight", "dbias"):
        if back:
            return array.reshape(*array.shape[: array.ndim - len(shape)], math.prod(shape))
        return array.reshape(*array.shape[:-1], *shape)
    return array


def _make_sensible(call: Call, quantized: np.dtype[Any]) -> None:
    """Leave out what does not go together."""
    given = call.given

    def leave_out(*names: str) -> None:
        for name in names:
            given.pop(name, None)
            call.placed.pop(name, None)

    if ("mean" in given) != ("rstd" in given) and "layer_norm" in call.name:
        leave_out("mean", "rstd")
    if given.get("dim", -1) % max(1, call.rank) != call.rank - 1:
        leave_out("causal", "sink", "return_dsink")
    if "causal" not in given:
        leave_out("window")
    if not call.softmax and given.get("row_scaling"):
        leave_out("scale", "amax", "scale_inv")
    if "scale" not in given:
        leave_out("scale_inv")
    if not call.softmax and (given.get("row_scaling") or {"scale", "amax"} & given.keys()):
        leave_out("out")
        given["out_dtype"] = quantized
    if not given.get("return_dx", True):
        leave_out("out", "return_dx" if given.get("return_dweight") is not True else "")
    if "out" in given:
        leave_out("out_dtype")
    if "up" not in given:
        leave_out("return_dup")
    if not ("sink" in given and "lse" in given):
        leave_out("return_dsink", *(["sink"] if "backward" in call.name else []))
    if call.softmax and "backward" in call.name:
        if "mask" not in given:
            leave_out("return_dmask")
        elif given.get("return_dmask", True):
            leave_out("out")  # which is mostly in place
    given.update({"sm_margin": given["sm_margin"] % 8} if "sm_margin" in given else {})


def run(call: Call, ended: Counter[str]) -> None:
    """Make a call, and hold it to one of its ends."""
    inputs = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in call.given.items()}
    places = {id(place): place for place in call.placed.values()}
    before = {key: place.base.copy() for key, place in places.items()}
    try:
        result = call.make()
    except TransformerRtcError:
        ended["refused"] += 1
        for key, place in places.items():
            assert place.base.tobytes() == before[key].tobytes(), f"{call!r} wrote, and was refused"
        return
    ended[call.name] += 1
    written = [name for name in ("out", "residual_out", "amax", "scale_inv") if name in call.given]
    for key, place in places.items():
        elsewhere = np.ones(place.base.shape, bool)
        for name in written:
            if call.placed.get(name) is place:
                shift = call.given[name].__array_interface__["data"][0] - place.array.__array_interface__["data"][0]
                place.view_of(elsewhere, shift // place.base.itemsize)[...] = False
        assert place.base[elsewhere].tobytes() == before[key][elsewhere].tobytes(), f"{call!r} wrote elsewhere"
    results = _tuple(result)
    inputs = {
        name: _selected(call, name, value, back=True) if isinstance(value, np.ndarray) else value
        for name, value in inputs.items()
    }
    expected = _REFERENCES[FAMILIES[call.name]](call, inputs)
    names = [name for name in expected if name not in ("amax", "scale_inv")]
    assert len(names) == len(results), f"{call!r} returned {len(results)} arrays"
    found = dict(zip(names, results, strict=True))
    for name in ("amax", "scale_inv"):
        if inputs.get(name) is not None:
            found[name] = call.given[name]
    if call.given.get("out") is not None:
        assert found["out"] is call.given["out"]
    for name, array in found.items():
        value = expected[name]
        if name in ("amax", "scale_inv"):
            value = Expected(value.value.reshape(array.shape), value.bound.reshape(array.shape))
        array = _selected(call, name, array, back=True)
        reference.assert_within(array, value, DTYPES[array.dtype], f"{call!r}: {name}")


def _norm(call: Call, given: Mapping[str, Any]) -> dict[str, Expected]:
    centred = "layer_norm" in call.name
    eps = float(given.get("eps", 1e-5 if centred else 1e-6))
    offset = float(given.get("weight_offset", 0))
    weight, bias = given.get("weight"), given.get("bias")
    if call.name.endswith("backward"):
        x = given["s"] if "s" in given else given["x"]
        dresidual = given["ds"] if "ds" in given else given.get("dresidual")
        found = reference.backward(
            centred, given["dy"], x, weight, eps, offset, given.get("mean"), given.get("rstd"), dresidual
        )
        wanted = {
            "out": given.get("return_dx", True), "dweight": given.get("return_dweight"),
            "dbias": given.get("return_dbias", None if centred else False),
        }  # fmt: skip
        return {
            name: value for name, value in found.items()
            if (weight is not None if wanted[name] is None else wanted[name])
        }  # fmt: skip
    x, residual = given["x"], given.get("residual")
    found = {}
    if call.name.startswith("add_"):
        given_sum = given.get("residual_out")
        sum_ = given_sum.dtype if given_sum is not None else np.dtype(given.get("residual_dtype") or residual.dtype)
        x, residual = reference.added(x, residual, DTYPES[sum_]), None
        found["residual_out"] = Expected(x.astype(np.float64), np.zeros(x.shape))
    like = given["residual"].dtype if call.name.endswith("_add") else given["x"].dtype
    out = given["out"].dtype if given.get("out") is not None else np.dtype(given.get("out_dtype") or like)
    rounds = bool(given.get("round_before_weight", False))
    made = reference.forward(centred, x, weight, bias, eps, offset, residual, DTYPES[out], rounds)
    y = made.pop("out")
    results = {"out": y, **found}
    results |= {name: made[name] for name in ("mean", "rstd") if given.get(f"return_{name}", False)}
    return results | _scaled(y, DTYPES[out], given)


def _scaled(y: Expected, out: DType, given: Mapping[str, Any]) -> dict[str, Expected]:
    """Return what becomes of y by scales, and they themselves."""
    results = {"out": y}
    if given.get("amax") is not None:
        results["amax"] = reference.largest_magnitude(y, 0.25)
    if given.get("scale") is not None:
        results["out"] = reference.scaled(y, given["scale"])
        if given.get("scale_inv") is not None:
            size = y.value.size
            inverse = 1.0 / given["scale"].astype(np.float64) if size else given["scale_inv"].astype(np.float64)
            results["scale_inv"] = Expected(np.asarray(inverse), np.zeros(np.shape(inverse)))
    if given.get("row_scaling", False):
        results["out"], results["row_scale"] = reference.row_scaled(y, out)
    return results


def _activation(call: Call, given: Mapping[str, Any]) -> dict[str, Expected]:
    x, up = given["x"], given.get("up")
    out = given["out"].dtype if given.get("out") is not None else np.dtype(given.get("out_dtype") or x.dtype)
    options = {"approximate": "tanh"} if given.get("approximate") else {}
    gated = "_and_mul" in call.name
    packed = gated and up is None
    kind = Kind(call.name.removesuffix("_backward"), gated, packed, options)
    if packed:
        x, up = np.split(x, 2, axis=-1)
    narrow = out != np.float32
    if not call.name.endswith("_backward"):
        return _scaled(expected_of(kind, x, up, narrow), DTYPES[out], given)
    # Where one of two gradients is of float32, so is what both are found from.
    asked = given.get("return_dup")
    has_dup = gated and not packed and (asked is None or asked)
    narrow_both = narrow and not (has_dup and up.dtype == np.float32)
    dx, dup = gradients_of(kind, given["dy"], x, up, (narrow_both, narrow_both))
    if packed:
        return {
            "out": Expected(*(np.concatenate(pair, axis=-1) for pair in zip(*map(astuple, (dx, dup)), strict=True)))
        }
    return {"out": dx, **({"dup": dup} if has_dup else {})}


def _softmax(call: Call, given: Mapping[str, Any]) -> dict[str, Expected]:
    backward, logarithm = "backward" in call.name, call.name.startswith("log")
    first = given["y"] if backward else given["x"]
    shape = first.shape if first.ndim > 1 else (1, *first.shape)
    scale, sink, lse = float(given.get("scale", 1.0)), given.get("sink"), given.get("lse")
    out = given["out"].dtype if given.get("out") is not None else np.dtype(given.get("out_dtype") or first.dtype)
    window = given.get("window")
    region = {"causal": given.get("causal"), "window": window and min(window, 2**40)}

    def like(value: Expected, of: tuple[int, ...]) -> Expected:
        return Expected(value.value.reshape(of), value.bound.reshape(of))

    if backward:
        dy, y = given["dy"].reshape(shape), first.reshape(shape)
        within = softmax_reference.taking_part(shape, **region)
        found = {"out": like(softmax_reference.backward(dy, y, scale, within, logarithm, DTYPES[out]), first.shape)}
        asked = given.get("return_dsink")
        if (sink is not None) if asked is None else asked:
            found["dsink"] = softmax_reference.sink_gradient(dy, y, sink, lse, within, logarithm)
        asked, mask = given.get("return_dmask"), given.get("mask")
        if (mask is not None) if asked is None else asked:
            found["dmask"] = softmax_reference.mask_gradient(dy, y, mask.shape, within, logarithm)
        return found
    mask = given.get("mask")
    added = mask if mask is not None and mask.dtype in FLOATS else None
    hides = None if added is not None else mask
    within = softmax_reference.taking_part(shape, hides, bool(given.get("mask_keeps", False)), **region)
    if added is not None:
        within &= np.broadcast_to(added.astype(np.float32) != -np.inf, shape)
    made = softmax_reference.forward(first.reshape(shape), scale, within, DTYPES[out], added, sink)
    found = {"out": like(made["log_y" if logarithm else "y"], first.shape)}
    if given.get("return_lse", False):
        found["lse"] = like(made["lse"], first.shape[:-1])
    return found


_REFERENCES = {"norms": _norm, "softmax": _softmax, "activations": _activation}


def hold_calls(count: int) -> None:
    """Make so many calls, and hold each to one of its ends."""
    ended: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def one(call: Call) -> None:
        run(call, ended)

    one()
    # It has tried both ends, and of every function the right one, if there were so many that none is missed by chance.
    assert count < 5000 or all(ended[name] for name in FAMILIES), ended
    assert count / 5 < ended["refused"] < 4 * count / 5, ended
