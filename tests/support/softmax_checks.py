# SPDX-License-Identifier: Apache-2.0
"""What softmax promises, for the simulator and for a GPU: calls on arrays of a rig, held against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import softmax_reference as expected
from frameworks import Guarded, bits
from norm_checks import covering, first_of
from reference import NUMPY_TYPES, U, assert_within
from rigs import Rig

import transformer_rtc
from transformer_rtc import SimulatedDevice, using
from transformer_rtc.arrays import simulated as simulated_calls
from transformer_rtc.declaration import declarations
from transformer_rtc.operator import Operator
from transformer_rtc.ops.softmax import family
from transformer_rtc.ops.softmax.config import SoftmaxConfig
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, DType

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
CHOSEN = "as chosen"
DTYPE_OF = {dtype.name: dtype for dtype in FLOATS}
NAMES = ("softmax", "log_softmax")
# Shapes that are broadcast to (2, 3, 17, 40).
MASKS = ((2, 3, 17, 40), (2, 1, 17, 40), (1, 1, 17, 40), (2, 1, 1, 40), (17, 40), (40,))

# ---- Ways to hold a row ----------------------------------------------------------------------------------------------

_CTAS = SoftmaxConfig(64, 1, 8, 2, 4, True)
_CHUNKS_OF_CTAS = SoftmaxConfig(64, 1, 8, 1, 2, True, chunked=True)
_STAGED_BY_CTAS = SoftmaxConfig(64, 1, 8, 1, 2, True, staged=True)
# How a row is divided, and the architecture: 80 has no clusters, so that CTAs meet in a cooperative grid. None: as the
# rule has it.
WAYS: dict[str, tuple[SoftmaxConfig | None, int]] = {
    CHOSEN: (None, 90),
    "general": (None, 90),
    "few threads": (SoftmaxConfig(2, 32, 8, 4), 90),
    "warp": (SoftmaxConfig(8, 16, 8, 2), 90),
    "warps": (SoftmaxConfig(64, 2, 8, 3), 90),
    "chunks": (SoftmaxConfig(64, 1, 8, 3, chunked=True), 90),
    "CTAs": (_CTAS, 90),
    "CTAs of a grid": (_CTAS, 80),
    "in turn": (dataclasses.replace(_CTAS, persistent=True), 90),
    "in turn of a grid": (dataclasses.replace(_CTAS, persistent=True), 80),
    "chunks of CTAs": (_CHUNKS_OF_CTAS, 90),
    "chunks of CTAs of a grid": (_CHUNKS_OF_CTAS, 80),
    "staged": (SoftmaxConfig(64, 1, 8, 1, staged=True), 90),
    "staged by a warp": (SoftmaxConfig(32, 1, 8, 1, staged=True), 90),
    "staged by three warps": (SoftmaxConfig(96, 1, 8, 1, staged=True), 90),
    "staged by CTAs": (_STAGED_BY_CTAS, 90),
    "staged by CTAs of a grid": (_STAGED_BY_CTAS, 80),
    "four warps": (SoftmaxConfig(128, 1, 8, 2), 90),
}
DIVIDED = [way for way, (config, _) in WAYS.items() if config]


def capacity(way: str, dtype: DType) -> int:
    """Return the columns of the longest row that a way holds."""
    config, _ = WAYS[way]
    if config is None or config.chunked or config.staged:
        return 1 << 30
    return config.threads_per_row * config.vectors_per_thread * config.ctas_per_row * 16 // dtype.bytes


def type_of(way: str) -> DType:
    """Return the type that a way is tried with first: kernels of one type serve several tests."""
    return (BFLOAT16, FLOAT32)[list(WAYS).index(way) % 2]


def of_ways(ways: Sequence[str], columns: Sequence[int], share: float = 0.2) -> list[Any]:
    """Return each way with each length and type that it holds; all but the first of most ways are thorough."""
    made = []
    for way in ways:
        types = sorted((BFLOAT16, FLOAT32), key=lambda dtype: dtype is not type_of(way))
        fitting = [(way, one, dtype) for dtype in types for one in columns if one <= capacity(way, dtype)]
        made += first_of(fitting, way != "four warps", share)  # which are `warps` again
    return made


def calls_of(
    check: Any, *axes: Sequence[Any], ways: Sequence[str] = ("general", CHOSEN), first: int = 0, share: float = 0.25
) -> list[Any]:
    """Return a check with ways to hold a row and values.

    All are thorough but the general kernels, which are compiled once for all tests, with each value of an axis, and
    the first cases of the other ways.
    """
    made, name = [], check.__name__.removeprefix("hold_")
    others = list(itertools.product([way for way in ways if way != "general"], *axes))
    if "general" in ways:
        made += covering(["general"], *axes, share=share)
    return [
        pytest.param(check, *one.values[:1], one.values[1:], marks=one.marks, id=f"{name}-{one.id}")
        for one in (*made, *first_of(others, first, share))
    ]


def simulated(architecture: int = 90, static: bool = False, multiprocessors: int = 16, checked: bool = True) -> Rig:
    return Rig(SimulatedDevice(architecture, checked=checked, static=static, multiprocessors=multiprocessors))


@contextlib.contextmanager
def configured(config: SoftmaxConfig) -> Iterator[None]:
    """Have rows divided by one configuration, in vectors of the types; in turn where they may be."""

    def configure(row, limits):
        clusters = config.clusters and limits.max_cluster_size > 1
        in_turn = config.persistent and row.backward and not row.causal
        return config.replace(vec_size=row.vec_size, clusters=clusters, persistent=in_turn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "configure", configure)
        for name, declaration in declarations().items():
            if declaration.family.name == "softmax":
                patch.setitem(getattr(transformer_rtc, name).__globals__, f"_{name}", Operator(declaration).call)
        yield


@contextlib.contextmanager
def held(way: str, multiprocessors: int = 16) -> Iterator[Rig]:
    """Have rows held in a way; yield a simulated device for it."""
    config, architecture = WAYS[way]
    with configured(config) if config else contextlib.nullcontext():
        yield simulated(architecture, way == "general", multiprocessors)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have NaN in outputs, and in what launches leave for others, before anything is written."""
    empty = simulated_calls.host_memory

    def filled(shape, dtype):
        made = empty(shape, dtype)
        made.reshape(-1).view(np.uint8).fill(0xFF)
        return made

    monkeypatch.setattr(simulated_calls, "host_memory", filled)


# ---- Calls -----------------------------------------------------------------------------------------------------------


def place(on: Rig, host: np.ndarray, offset: int = 0, gap: int = 0, between: int = 0) -> Guarded:
    """Put an array behind an aligned address, with elements between its rows and rows between its matrices."""
    strides = [1]
    for number, extent in enumerate(host.shape[:0:-1]):
        strides.insert(0, strides[0] * (extent + (gap, between, 0)[min(number, 2)]))
    return Guarded(on.arrays, host.shape, DTYPE_OF[host.dtype.name], offset, tuple(strides)).fill(host)


def at(on: Rig, host: np.ndarray, *lie: int) -> Any:
    return place(on, host, *lie).array


def call(on: Rig, operator: str, *given: Any, **options: Any) -> Any:
    """Call an operator with arrays of the host, or those that lie somewhere; return its results on the host."""

    def there(one: Any) -> Any:
        return on.arrays.array(one) if isinstance(one, np.ndarray) and on.arrays.name != "numpy" else one

    options = {name: there(one) for name, one in options.items()}
    with using(on.implementation):
        made = getattr(transformer_rtc, operator)(*map(there, given), **options)
    results = made if isinstance(made, tuple) else (made,)
    assert options.get("out") is None or results[0] is options["out"]
    assert all(map(on.arrays.is_dense, results[options.get("out") is not None :]))
    found = tuple(map(on.arrays.host, results))
    return found if isinstance(made, tuple) else found[0]


def hold(
    on: Rig,
    x: np.ndarray,
    dy: np.ndarray,
    dtype: DType,
    scale: float = 1.0,
    lie: Sequence[int] = (),
    names: Sequence[str] = NAMES,
    **options: Any,
) -> None:
    """Hold all four operators against float64, with the gradients of a sink and of a mask of floats.

    `lie`: where x and dy are put, as `place` has it.
    """
    mask, keeps, sink = options.get("mask"), options.get("mask_keeps", False), options.get("sink")
    region = {name: options[name] for name in ("causal", "window") if name in options}
    added = mask if mask is not None and mask.dtype.itemsize > 1 else None
    within = expected.taking_part(x.shape, mask if added is None else added == -np.inf, keeps, **region)
    found = expected.forward(x, scale, within, dtype, added, sink)
    # The backward does not read there: it must not rely on zeros.
    beyond = ~expected.taking_part(x.shape, **region)
    for name in names:
        logarithm, there = name == "log_softmax", at(on, x, *lie)
        y, lse = call(on, name, there, scale=scale, return_lse=True, **options)
        assert_within(y, found["log_y" if logarithm else "y"], dtype, f"y of {name}")
        assert_within(lse, found["lse"], FLOAT32, f"lse of {name}")
        assert not np.signbit(y[~within]).any() or logarithm, "zeros without a sign"
        y[beyond] = np.nan
        wanted = {"dx": (expected.backward(dy, y, scale, within, logarithm, dtype), dtype)}
        given = {**region, **({} if added is None else {"mask": added})}
        if sink is not None:
            given |= {"sink": sink, "lse": lse}
            dsink = expected.sink_gradient(dy, y, sink, lse, within, logarithm)
            wanted["dsink"] = (dsink, DTYPE_OF[sink.dtype.name])
        if added is not None:
            dmask = expected.mask_gradient(dy, y, added.shape, within, logarithm)
            wanted["dmask"] = (dmask, DTYPE_OF[added.dtype.name])
        made = call(on, f"{name}_backward", at(on, dy, *lie), y, scale=scale, **given)
        results = made if isinstance(made, tuple) else (made,)
        for result, (what, (value, of_type)) in zip(results, wanted.items(), strict=True):
            assert_within(result, value, of_type, f"{what} of {name}")


def hold_drawn(
    on: Rig,
    rng: np.random.Generator,
    shape: Sequence[int],
    dtype: DType,
    scale: float = 1.0,
    spread: float = 3.0,
    **options: Any,
) -> None:
    """Hold random rows; what a mask of bytes or a causal mode excludes is NaN, as it must not be used."""
    x, dy = (expected.drawn(rng, shape, dtype, spread) for _ in range(2))
    mask = options.get("mask")
    hides = mask if mask is not None and mask.dtype.itemsize == 1 else None
    region = {name: options[name] for name in ("causal", "window") if name in options}
    excluded = ~expected.taking_part(shape, hides, options.get("mask_keeps", False), **region)
    x[excluded] = dy[excluded] = np.nan
    hold(on, x, dy, dtype, scale, **options)


# ---- Lengths, places and types ---------------------------------------------------------------------------------------


def hold_each(
    on: Rig, rng: np.random.Generator, rows: int, columns: int, dtype: DType, lie: Sequence[int] = ()
) -> None:
    """Hold one of the operators, and the other with a sink, for whose gradient the backward leaves each row's sum."""
    hold_drawn(on, rng, (1, rows, columns), dtype, -0.4, lie=lie, names=NAMES[:1])
    sink = np.array([1.5], NUMPY_TYPES[dtype])
    hold_drawn(on, rng, (1, rows, columns), dtype, 0.3, lie=lie, names=NAMES[1:], sink=sink)


def hold_length(on: Rig, rng: np.random.Generator, columns: int, dtype: DType) -> None:
    most = 1 << 15 if isinstance(on.implementation, SimulatedDevice) else 1 << 20  # elements
    hold_drawn(on, rng, (max(2, min(130, most // columns)), columns), dtype, 0.3)


def hold_rows_of_few_threads(on: Rig, rng: np.random.Generator, columns: int, dtype: DType) -> None:
    """Hold rows of a thread or of few, one and many, wherever they lie."""
    for rows, lie in itertools.product((1, 67), ((0, 0), (1, 0), (0, 3), (7, 8))):
        hold_drawn(on, rng, (rows, columns), dtype, 0.7, lie=lie)


def hold_same_bits(
    on: Rig, rng: np.random.Generator, columns: int, dtype: DType = BFLOAT16, out: DType | None = None
) -> None:
    """Hold a row to the same bits alone and as one of many, wherever it and its gradient lie."""
    x, dy = (np.repeat(expected.drawn(rng, (1, 1, columns), dtype), 9, axis=1) for _ in range(2))
    x -= x.max()  # few terms make a row's sum, which is about 1: its last bit shows in lse
    x[..., 5:9], dy[..., 5:9] = -np.inf, np.nan  # what took no part
    first: list[np.ndarray] = []
    options = {"scale": 2.0, "out_dtype": (out or dtype).name, "return_lse": True}
    sink = np.zeros(1, x.dtype)
    # With an element between them, rows lie at every alignment; y lies as dy does, and otherwise.
    for rows, of_x, of_dy in ((1, 0, 0), (9, 0, 0), (9, 0, 1), (9, 3, 0), (9, 8, 5)):
        there = at(on, x[:, :rows], of_x, 1)
        y, lse = call(on, "softmax", there, **options)
        dx = call(on, "softmax_backward", at(on, dy[:, :rows], of_dy, 1), at(on, y, of_x, 1), out_dtype=y.dtype.name)
        assert (dx[..., 5:9] == 0).all() and np.isfinite(dx.astype(np.float32)).all()
        results = [bits(result[0]) for result in (y, lse, dx, *call(on, "log_softmax", there, sink=sink, **options))]
        first = first or [result[0] for result in results]
        for result, wanted in zip(results, first, strict=True):
            np.testing.assert_array_equal(result, np.broadcast_to(wanted, result.shape))


def hold_outputs(on: Rig, rng: np.random.Generator, columns: int, output: DType) -> None:
    """Hold outputs that lie somewhere to float64, and what lies around them to what it was."""
    x, dy = (expected.drawn(rng, (37, columns), FLOAT16) for _ in range(2))
    for offset, gap in ((0, 0), (1, 0), (0, 3), (8, 8), (4, -columns % 8 + 8)):
        y, dx = (place(on, np.zeros((37, columns), NUMPY_TYPES[output]), offset + more, gap) for more in (0, 2))
        found = call(on, "softmax", x, out=y.array)
        assert_within(found, expected.forward(x, out=output)["y"], output, "y")
        gradient = call(on, "softmax_backward", dy, y.array, out=dx.array)
        assert_within(gradient, expected.backward(dy, np.array(found), out=output), output, "dx")
        y.assert_intact_around()
        dx.assert_intact_around()


def hold_in_place(on: Rig, rng: np.random.Generator, columns: int) -> None:
    for offset in (3, 0):
        x, dy = (expected.drawn(rng, (5, columns), BFLOAT16) for _ in range(2))
        there, of_dy = at(on, x, offset), at(on, dy)
        y = call(on, "softmax", there, out=there, return_lse=True)[0].copy()
        assert_within(y, expected.forward(x, out=BFLOAT16)["y"], BFLOAT16)
        dx = call(on, "softmax_backward", of_dy, there, out=of_dy)
        assert_within(dx, expected.backward(dy, y, out=BFLOAT16), BFLOAT16)
        again = call(on, "softmax_backward", dy, there, out=there)  # in the place of y
        np.testing.assert_array_equal(bits(again), bits(dx))


OF_TYPES = list(itertools.permutations(FLOATS, 2))


def hold_types(on: Rig, rng: np.random.Generator, columns: int, types: Sequence[DType]) -> None:
    """Hold outputs of another type than inputs, of one of q, k and v that lie together, below a sink."""
    x_type, out = types
    qkv, dy = expected.drawn(rng, (9, 3, 4, columns), x_type), expected.drawn(rng, (9, 4, columns), x_type)
    x, sink = place(on, qkv).array[:, 1], np.zeros(9, np.float32)
    y, lse = call(on, "softmax", x, sink=sink, out_dtype=out.name, return_lse=True)
    found = expected.forward(qkv[:, 1], 1.0, None, out, None, sink)
    assert_within(y, found["y"], out, "y")
    assert_within(lse, found["lse"], FLOAT32, "lse")
    assert_within(call(on, "softmax_backward", dy, y), expected.backward(dy, y, out=out), out, "dx")
    dx = call(on, "softmax_backward", dy.astype(y.dtype), y, out_dtype=x_type.name)
    assert_within(dx, expected.backward(dy.astype(y.dtype), y, out=x_type), x_type, "dx")


def hold_float32(on: Rig, rng: np.random.Generator, columns: int) -> None:
    """Hold float32 to two ulp, and one more for each unit below the largest, and rows to a sum of one."""
    for spread in (0.01, 1, 5, 30):
        x = expected.drawn(rng, (4, columns), FLOAT32, spread)
        y = call(on, "softmax", x).astype(float)
        below = x.max(axis=-1, keepdims=True).astype(float) - x
        exact = np.exp(-below) / np.exp(-below).sum(axis=-1, keepdims=True)
        far = exact < 2.0**-126  # no longer normal
        assert ((np.abs(y - exact) <= exact * (2 + below) * 2 * U) | far).all()
        assert np.abs(y.sum(axis=-1) - 1).max() <= 8 * U


# ---- Masks, causal modes and sinks -----------------------------------------------------------------------------------


def hold_mask(on: Rig, rng: np.random.Generator, shape: Sequence[int], keeps: bool) -> None:
    """Hold a mask that is broadcast, of either type and with gaps; of a row of several, nothing takes part."""
    mask = rng.random(shape) < 0.3
    if mask.ndim > 1:
        mask[..., 0, :] = not keeps
    gaps = np.zeros((*(2 * extent for extent in shape[:-1]), shape[-1] + 9), bool)
    gaps = gaps[(*[slice(None, None, 2)] * (len(shape) - 1), slice(4, -5))]
    gaps[...] = mask
    for given in (mask, gaps, mask * rng.integers(1, 256, shape, np.uint8)):  # any bit says it
        hold_drawn(on, rng, (2, 3, 17, 40), (FLOAT32, BFLOAT16)[keeps], 0.5, mask=given, mask_keeps=keeps)


def hold_added_mask(on: Rig, rng: np.random.Generator, keys: int, added: DType, dtype: DType) -> None:
    """Hold a mask of floats, which excludes some elements and a whole row, beside a sink: both have gradients."""
    mask, sink = expected.drawn(rng, (3, 9, keys), added), np.array([0.5, -np.inf, 20], NUMPY_TYPES[dtype])
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    mask[1, 4] = -np.inf
    hold_drawn(on, rng, (2, 3, 9, keys), dtype, 0.6, mask=mask, sink=sink)


def hold_causal(on: Rig, rng: np.random.Generator, shape: Sequence[int], window: int | None) -> None:
    for causal in ("aligned", "upper_triangular")[: 2 if shape[0] == shape[1] else 1]:
        hold_drawn(on, rng, (2, 2, *shape), BFLOAT16, 1.5, causal=causal, window=window)


# Rows, the heads' sinks, and whether there are a mask and a causal mode: with a row of which nothing takes part; far
# above or below the others, where exponentials about the others' largest one are infinite, or 0; of more rows than
# threads that add them up; of one query or one head.
SINKS = (
    ((2, 4, 6, 5), (0.5, -np.inf, 20, -3), "mask"), ((2, 4, 6, 400), (0.5, -np.inf, 20, -3), "mask"),
    ((2, 3, 5, 40), (200, -200, 95), ""), ((2, 2, 600, 5), (1, -1), ""), ((5, 3, 1, 61), (-1, 0.5, 2), "mask causal"),
    ((3, 1, 7, 16), (-1,), "mask causal"), ((4, 1, 1, 9), (-1,), "mask causal"),
)  # fmt: skip


def hold_sink(on: Rig, rng: np.random.Generator, sinks: tuple[Any, ...], dtype: DType) -> None:
    shape, sink, more = sinks
    options = {"causal": "aligned"} if "causal" in more else {}
    if "mask" in more:
        options["mask"] = rng.random((1, 1, *shape[2:])) < 0.3
        options["mask"][..., -1, :] = True
    hold_drawn(on, rng, shape, dtype, 1.3, sink=np.array(sink, NUMPY_TYPES[dtype]), **options)


def hold_gradient(
    on: Rig, rng: np.random.Generator, shapes: Sequence[Sequence[int]], types: Sequence[DType] = (FLOAT32,) * 3,
    logarithm: bool = False, lies: Sequence[Sequence[Sequence[int]]] = (((), ()),), **region: Any,
) -> None:  # fmt: skip
    """Hold the gradient of a mask against float64, beside dx, and to the same bits wherever dy and y lie.

    `shapes`: of the rows and of the mask; `types`: of dy, y and the mask.
    """
    shape, of_mask = shapes
    within = expected.taking_part(shape, rng.random(of_mask) < 0.3, **region)
    y = rng.uniform(0.1, 1, shape) / shape[-1]
    y = np.where(within, np.log(y) if logarithm else y, -np.inf if logarithm else 0).astype(NUMPY_TYPES[types[1]])
    dy = expected.drawn(rng, shape, types[0])
    dy[~within] = rng.choice([np.nan, np.inf, -np.inf], (~within).sum())
    y[~expected.taking_part(shape, **region)] = np.nan
    mask = np.full(of_mask, np.nan, NUMPY_TYPES[types[2]])  # its elements are not read
    wanted = expected.mask_gradient(dy, y, of_mask, within, logarithm)
    first = None
    for of_dy, of_y in lies:
        given = {"mask": mask, "out_dtype": "float32", **region}
        dx, dmask = call(on, f"{NAMES[logarithm]}_backward", at(on, dy, *of_dy), at(on, y, *of_y), **given)
        assert dmask.shape == mask.shape and dmask.dtype == mask.dtype
        first = bits(dmask) if first is None else first
        np.testing.assert_array_equal(bits(dmask), first)
        assert_within(dmask, wanted, types[2], "dmask")
        assert_within(dx, expected.backward(dy, y, 1.0, within, logarithm), FLOAT32, "dx")
