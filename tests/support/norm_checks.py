# SPDX-License-Identifier: Apache-2.0
"""What every norm promises wherever its rows lie and whatever the other rows are: in the simulator and on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import calls
import numpy as np
import pytest
import reference
from cases import BACKWARD, BY_ROW, DELAYED, FLOAT8, FLOATS, FORWARD, NORMS, Case
from frameworks import bits
from rigs import ALIGNED, MISALIGNED, OF_ROWS, SECOND_MISALIGNED, Rig, assert_same_bits, hold, run

from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, INT8, DType


def case_of(
    operator: str, rows: int, hidden: int, dtype: DType = FLOAT32, other: DType | None = None, **options: Any
) -> Case:
    """Return a case of an operator with all that it takes but scales and statistics, of one type or of two."""
    other, back = other or dtype, operator in BACKWARD
    case = Case(
        rows, hidden, dtype, dtype, other, not back, operator, bias=None if back else dtype, dy=other if back else None,
        residual=other if "add" in operator else None, mean=not back and "layer_norm" in operator,
        dweight=other if back else None, dbias=other if back else None,
    )  # fmt: skip
    return case._replace(**options)


def _name(value: Any) -> str:
    if type(value) is tuple:
        return "_".join(map(_name, value))
    if isinstance(value, dict):
        return "_".join(f"{key}_{_name(one)}" for key, one in value.items()) or "plain"
    return getattr(value, "symbol", None) or getattr(value, "name", None) or str(value)


def _param(values: Any, few: bool, share: float) -> Any:
    values = values if type(values) is tuple else (values,)
    marks = [] if few else [pytest.mark.thorough(share=share)]
    return pytest.param(*values, marks=marks, id="-".join(map(_name, values)))


def covering(*axes: Sequence[Any], share: float = 1, first: int = 0) -> list[Any]:
    """Return the parameters of a product: thorough ones, but for a few in which each value occurs, or the first ones.

    `first`: how many are not thorough; as many as the longest axis has values where it is 0.
    """
    turns = range(first or max(map(len, axes), default=0))
    few = {tuple(axis[turn % len(axis)] for axis in axes) for turn in turns}
    return [_param(values, values in few, share) for values in itertools.product(*axes)]


def first_of(values: Sequence[Any], first: int = 1, share: float = 1) -> list[Any]:
    """Return parameters, of which all but the first ones are thorough."""
    return [_param(value, number < first, share) for number, value in enumerate(values)]


def calls_of(check: Any, *axes: Sequence[Any], share: float = 1, first: int = 0) -> list[Any]:
    """Return a check with each of its arguments, as `covering` has them."""
    return [
        pytest.param(check, found.values, marks=found.marks, id="-".join(filter(None, (check.__name__, found.id))))
        for found in (covering(*axes, share=share, first=first) if axes else [pytest.param(id="")])
    ]


LAYOUTS = (ALIGNED, MISALIGNED, SECOND_MISALIGNED)

# ---- Where rows lie ------------------------------------------------------------------------------------------------

# Offsets of rows, columns and outputs, each alone and together, and rows padded by an odd number of elements.
EVERY_ALIGNMENT = [
    ALIGNED,
    *itertools.chain.from_iterable(
        ((n, 0, 0, 16), (0, n, 0, 16), (0, 0, n, 16), (n, n, n, 1), (n, 0, 8 - n, 7)) for n in range(1, 9)
    ),
]


def every_alignment_gives_the_same_bits_and_writes_nothing_else(
    rig: Rig, hidden: int, operator: str, rng: np.random.Generator
) -> None:
    # Arrays of one type or of two.
    number = hidden + NORMS.index(operator)
    x, other = FLOATS[number % 3], FLOATS[number // 3 % 3]
    options = {"residual": other, "dweight": x, "dbias": None} if operator in BACKWARD else {}
    case = case_of(operator, 3, hidden, x, other, weight=other, weight_offset=0.5, **options)
    hold([rig], case, rng, EVERY_ALIGNMENT[:: 4 if rig.simulated and hidden >= 4000 else 1])


def a_misaligned_output_of_another_type(rig: Rig, hidden: int, x: DType, out: DType, rng: np.random.Generator) -> None:
    scaling = BY_ROW if out is INT8 else DELAYED if out in FLOAT8 else ()
    layouts = [ALIGNED, *((0, 0, offset, hidden + offset) for offset in (1, 2, 3, 5))]
    hold([rig], Case(3, hidden, x, x, out, scaling=scaling), rng, layouts)


_IN_PLACE = {
    "": ({"out": "x"},),
    "before": (
        {"out": "x", "residual_out": "residual"}, {"out": "residual", "residual_out": "x"}, {"out": "x"},
        {"out": "residual"}, {"residual_out": "residual"}, {"residual_out": "x"},
    ),
    "after": ({"out": "x"}, {"out": "residual"}),
    "backward": ({"out": "x"}, {"out": "dy"}, {"out": "dresidual"}),
}  # fmt: skip


def in_place_gives_the_same_bits(rig: Rig, hidden: int, operator: str, dtype: DType, rng: np.random.Generator) -> None:
    residual = {"residual": dtype} if operator in BACKWARD else {}
    case = case_of(operator, 5, hidden, dtype, rstd=hidden % 2 == 0, **residual)
    given = calls.make_inputs(rng, case)
    expected = run(rig, case, given)
    calls.hold_within(case, expected, calls.expect(case, given))
    ways = _IN_PLACE["backward" if case.backward else case.adds]
    for layout, in_place in itertools.product((ALIGNED, MISALIGNED), ways):
        assert_same_bits(run(rig, case, given, layout, in_place), expected, f"{in_place}, {layout}")


def heads_inside_a_packed_qkv(
    rig: Rig, operator: str, of: str, hidden: int, heads: int, rng: np.random.Generator
) -> None:
    # k, and its gradient in a packed one, beside q and v, which stay as they are; with a weight of each head or of all.
    tokens = 5 if rig.simulated else 517
    case = case_of(operator, tokens * heads, hidden, FLOATS[(heads + hidden // 16) % 3], rstd=True, heads=heads)
    given = calls.make_inputs(rng, case)
    if of == "all":
        given |= {name: given[name][0].copy() for name in ("weight", "bias") if name in given}
    expected = calls.expect(case, given)
    q_of, k_of, v_of = (slice(part * heads, (part + 1) * heads) for part in range(3))
    dense = rig.on_host(rig.call(case, rig.on_device(given)))
    calls.hold_within(case, dense, expected)
    packed = {name: rig.guarded((tokens, 3 * heads, hidden), case.x, 1) for name in ("x", "dy") if name in given}
    arrays = rig.on_device(given)
    of_k = {name: rig.on_device({name: given[name]})[name] for name in packed}
    for name, place in packed.items():
        arrays[name] = place.array[:, k_of]
        arrays[name][...] = of_k[name]

    def hold_as_dense(found: Mapping[str, Any], what: str) -> None:
        host = rig.on_host(found)
        calls.hold_within(case, host, expected)
        # Sums over rows may be in another order: other CTAs are resident by the kernel for unaligned rows.
        same = [name for name in host if name in OF_ROWS]
        assert_same_bits({name: host[name] for name in same}, {name: dense[name] for name in same}, what)

    apart = rig.call(case, arrays)
    assert all(map(rig.arrays.is_dense, apart.values()))
    hold_as_dense(apart, "of heads apart from each other")
    # In the place of each, and then beside it.
    for part, untouched in ((k_of, (q_of, v_of)), (v_of, (q_of,))):
        for name, place in packed.items():
            out = place.array[:, part]
            within = rig.call(case, arrays, {"out": out})
            assert within["out"] is out
            hold_as_dense(within, f"in {name}, {part}")
            arrays[name][...] = of_k[name]
        for place, other in itertools.product(packed.values(), untouched):
            assert (bits(rig.arrays.host(place.array[:, other])) == -1).all(), f"{other} was written"
    for place in packed.values():
        place.assert_intact_around()


_BY_TWO_STRIDES = {
    "every seventh": lambda x: x[:, :, 3],
    "a block": lambda x: x[2:, 1:9],
    "permuted": lambda x: x.transpose(1, 2, 0, 3)[..., 2, :],
    "transposed": lambda x: x[:, 4].transpose(1, 0, 2),
    "every other": lambda x: x[::2, None],
    "one row": lambda x: x[0, 0, 0],
    "expanded outside": lambda x: np.broadcast_to(x[:1], (5, 10, 7, 200)),
    "expanded inside": lambda x: np.broadcast_to(x[:, :1, 0], (6, 9, 200)),
    "all one row": lambda x: np.broadcast_to(x[3, 3, 3], (4, 5, 200)),
    "backwards": lambda x: x[::-1, 2, 1],
    "backwards in both": lambda x: x[::-2, ::-3, 4],
    "backwards in one": lambda x: x[:, ::-1, 4],
}


def two_strides_in_any_order_backwards_and_without_end(rig: Rig, operator: str, rng: np.random.Generator) -> None:
    host = reference.random_rows(rng, (6, 10, 7, 200), FLOAT32)
    weight = reference.random_weight(rng, 200, FLOAT32)
    there = rig.arrays.array(host.reshape(-1))
    for name, view_of in _BY_TWO_STRIDES.items():
        view = view_of(host)
        strides = [stride // 4 for stride in view.strides]
        if min(strides) < 0 and not rig.arrays.reverses:
            continue
        start = (view.__array_interface__["data"][0] - host.__array_interface__["data"][0]) // 4
        x = rig.arrays.strided(there, view.shape, tuple(strides), start)
        case = Case(1, 200, FLOAT32, FLOAT32, FLOAT32, operator=operator)
        given = {"x": x, "weight": rig.arrays.array(weight)}
        y = rig.call(case, given)["out"]
        assert rig.arrays.is_dense(y), name
        y = rig.arrays.host(y)
        reference.assert_within(y, calls.expect(case, {"x": view, "weight": weight})["out"], FLOAT32, name)
        out = rig.guarded(view.shape, FLOAT32)
        assert rig.call(case, given, {"out": out.array})["out"] is out.array
        np.testing.assert_array_equal(bits(rig.arrays.host(out.array)), bits(y), err_msg=name)
        out.assert_intact_around()


def outputs_of_any_strides_change_nothing_around_them(rig: Rig, rng: np.random.Generator) -> None:
    rig = Rig(rig.implementation)  # only the host's arrays lie in any way
    x = reference.random_rows(rng, (5, 6, 100), FLOAT32)
    expected = reference.forward(False, x)["out"]
    memory = np.empty((5, 9, 111), np.float32)
    places = (
        (slice(None), slice(2, 8), slice(7, 107)),
        (slice(None, None, -1), slice(1, 7), slice(3, 103)),
        (slice(None), slice(7, 1, -1), slice(3, 103)),
    )
    case = Case(30, 100, FLOAT32, None, FLOAT32)
    for place in places:
        memory.fill(np.nan)
        out = memory[place]
        assert rig.call(case, {"x": x}, {"out": out}, eps=1e-6)["out"] is out
        reference.assert_within(out, expected, FLOAT32)
        # In place, the same bits.
        before, out[...] = out.copy(), x
        rig.call(case, {"x": out}, {"out": out}, eps=1e-6)
        np.testing.assert_array_equal(out, before)
        out.fill(np.nan)
        assert np.isnan(memory).all()


# ---- The other rows, and none --------------------------------------------------------------------------------------


def a_rows_bits_are_the_same_alone_and_among_many(
    rig: Rig, hidden: int, operator: str, dtype: DType, rng: np.random.Generator, most: int = 4099
) -> None:
    elements = 1 << (17 if rig.simulated else 28 if most < 65536 else 32)
    most = min(most, 517 if rig.simulated else most, max(1, elements // hidden))
    case = case_of(operator, 1, hidden, dtype, rstd=operator in FORWARD)
    host = calls.make_inputs(rng, case)
    alone: dict[str, np.ndarray] = {}
    for rows in [1, *(rows for rows in (1, 2, 3, 7, 129, 517, 1000, 4099, 65536) if rows <= most)]:
        given = rig.on_device(host)
        places = sorted({0, 1 % rows, rows // 2, rows - 1, int(rng.integers(rows))})
        for name, array_type in calls.input_types(case).items():
            if host[name].shape == case.shape:
                given[name], probe = rig.arrays.rows(rng, (rows, hidden), array_type), given[name]
                given[name][places] = probe
        results = rig.call(case._replace(rows=rows), given)
        for place, name in itertools.product(places, [name for name in results if name in OF_ROWS]):
            found = bits(rig.arrays.host(results[name][place : place + 1]))
            np.testing.assert_array_equal(found, alone.setdefault(name, found), f"{name}: row {place} of {rows}")
        del given, results


def a_rows_bits_are_the_same_alone_and_among_very_many(
    rig: Rig, hidden: int, operator: str, dtype: DType, rng: np.random.Generator
) -> None:
    a_rows_bits_are_the_same_alone_and_among_many(rig, hidden, operator, dtype, rng, 65536)


def a_margin_gives_the_same_bits(rig: Rig, hidden: int, operator: str, rng: np.random.Generator) -> None:
    rows = (37 if hidden > 4000 else 131) if rig.simulated else 1201 if hidden < 65536 else 301
    case = case_of(operator, rows, hidden, BFLOAT16, rstd=True)
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    without = run(rig, case, given)
    calls.hold_within(case, without, expected)
    most = rig.multiprocessors - 1
    for margin in {1, min(16, most), most}:
        found = run(rig, case._replace(margin=margin), given)
        # Sums over rows are of other groups.
        calls.hold_within(case, found, expected, f" with a margin of {margin}")
        same = [name for name in found if name in OF_ROWS]
        assert same
        assert_same_bits({name: found[name] for name in same}, {name: without[name] for name in same}, f"{margin}")


def no_rows_give_empty_outputs_and_sums_of_zero(
    rig: Rig, operator: str, leading: tuple[int, ...], rng: np.random.Generator
) -> None:
    case = case_of(operator, 0, 300, FLOAT16, rstd=True)
    given = {}
    for name, dtype in calls.input_types(case).items():
        shape = calls.shape_of(case, name)
        given[name] = np.ones((*leading, *shape[1:]) if 0 in shape else shape, reference.NUMPY_TYPES[dtype])
    results = rig.on_host(rig.call(case, rig.on_device(given)))
    for name, dtype in calls.result_types(case).items():
        array, shape = results[name], calls.shape_of(case, name)
        assert array.dtype == reference.NUMPY_TYPES[dtype]
        assert array.shape == ((*leading, *shape[1:]) if 0 in shape else shape)
        assert not bits(array).any()
