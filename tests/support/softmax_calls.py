"""Calls of softmax on arrays of the host, and what they are held against: in the simulator, or staged through a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import softmax_reference as expected
from reference import NUMPY_TYPES, assert_within

from transformer_rtc import dispatch, log_softmax, log_softmax_backward, softmax, softmax_backward
from transformer_rtc.ops import softmax as module
from transformer_rtc.ops.softmax_kernels import BUCKETS, SoftmaxConfig
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

DTYPE_OF = {dtype.name: dtype for dtype in (FLOAT32, FLOAT16, BFLOAT16)}

# Shapes that are broadcast to (2, 3, 17, 40).
MASKS = {
    "of each": (2, 3, 17, 40),
    "of each batch": (2, 1, 17, 40),
    "of all": (1, 1, 17, 40),
    "of keys": (2, 1, 1, 40),
    "of fewer dimensions": (17, 40),
    "of one row": (40,),
}


@contextlib.contextmanager
def configured(config: SoftmaxConfig) -> Iterator[None]:
    """Have rows divided by one configuration, in vectors of the types; in turn and tiled where they may be."""

    def configure(columns, rows, staged, limits, backward=False, causal=False, masked=False):
        vector = 16 // max(dtype.bytes for dtype in rows)
        clusters, in_turn = config.clusters and limits.max_cluster_size > 1, config.in_turn and backward and not causal
        tiled = config.tiled and not causal and not masked
        return dataclasses.replace(config, vector=vector, clusters=clusters, in_turn=in_turn, tiled=tiled)

    before = dispatch.operators()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "configure", configure)
            for operator in before.values():
                if operator.family is module._FAMILY:
                    made = dispatch.Operator(operator.name, operator.family, operator.arguments, BUCKETS)
                    patch.setattr(module, f"_{operator.name}", made.call)
            yield
    finally:
        dispatch._operators.update(before)


def at(array: np.ndarray, offset: int, gap: int = 0) -> np.ndarray:
    """Return the same rows in other memory, `offset` elements behind an aligned address and `gap` elements apart."""
    rows, columns = array.shape
    memory = np.full(offset + rows * (columns + gap) + 64, 77, array.dtype)
    start = -memory.ctypes.data // array.itemsize % 32 + offset
    found = np.lib.stride_tricks.as_strided(
        memory[start:], array.shape, ((columns + gap) * array.itemsize, array.itemsize)
    )
    found[...] = array
    return found


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def hold(x, dy, dtype, scale=1.0, within=None, added=None, **options) -> None:
    """Hold all four operators against float64, with the gradients of a sink and of a mask of floats."""
    found = expected.forward(x, scale, within, dtype, added, options.get("sink"))
    y, lse = softmax(x, scale=scale, return_lse=True, **options)
    log_y = log_softmax(x, scale=scale, **options)
    assert_within(y, found["y"], dtype, "y")
    assert_within(log_y, found["log_y"], dtype, "log_y")
    assert_within(lse, found["lse"], FLOAT32, "lse")
    sink, mask = options.get("sink"), None if added is None else options["mask"]
    options = {name: value for name, value in options.items() if name in ("causal", "window")}
    if options.get("causal"):
        # The backward does not read there: it must not rely on zeros.
        excluded = ~expected.taking_part(x.shape, **options)
        y[excluded] = log_y[excluded] = np.nan
    if sink is not None:
        options |= {"sink": sink, "lse": lse}
    if mask is not None:
        options["mask"] = mask
    for back, of, logarithm in ((softmax_backward, y, False), (log_softmax_backward, log_y, True)):
        wanted = {"dx": (expected.backward(dy, of, scale, within, logarithm, dtype), dtype)}
        if sink is not None:
            dsink = expected.sink_gradient(dy, of, sink, lse, within, logarithm)
            wanted["dsink"] = (dsink, DTYPE_OF[sink.dtype.name])
        if mask is not None:
            dmask = expected.mask_gradient(dy, of, mask.shape, within, logarithm)
            wanted["dmask"] = (dmask, DTYPE_OF[mask.dtype.name])
        made = back(dy, of, scale=scale, **options)
        results = made if isinstance(made, tuple) else (made,)
        for result, (name, (value, of_type)) in zip(results, wanted.items(), strict=True):
            assert_within(result, value, of_type, f"{name} of {back.__name__}")


def hold_same_bits(x: np.ndarray, dy: np.ndarray, offsets: Sequence[int]) -> None:
    """Hold a row's results in float32 to the same bits wherever it lies, alone or as one of many."""
    results = []
    for offset in offsets:
        y, lse = softmax(at(x, offset), out_dtype="float32", return_lse=True)
        dx = softmax_backward(at(dy, offset), at(y, offset), out_dtype="float32")
        results.append((bits(y), bits(lse), bits(dx)))
    # And as one of many rows, which lie at every alignment.
    many = np.repeat(x, 9, axis=0)[:, : x.shape[-1] - 1]
    y, lse = softmax(many, out_dtype="float32", return_lse=True)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(one, other)
    assert all((row == y[0]).all() for row in y) and (lse == lse[0]).all()


def hold_what_took_no_part(columns, of_y, of_dy, out, rng) -> None:
    """Hold dx to 0 just where y is 0 of either sign, or -infinity, beside the y next to that and sums of no number."""
    import ml_dtypes

    limits = ml_dtypes.finfo(NUMPY_TYPES[of_y])
    for back in (softmax_backward, log_softmax_backward):
        logarithm = back is log_softmax_backward
        absent = rng.random((4, columns)) < 0.4
        absent[1:3, :2] = False
        y = rng.uniform(0.1, 1, absent.shape)
        y = (np.log(y) if logarithm else y).astype(NUMPY_TYPES[of_y])
        y[absent] = -np.inf if logarithm else np.where(rng.random(absent.sum()) < 0.5, 0.0, -0.0)
        dy = expected.drawn(rng, y.shape, of_dy)
        dy[absent] = np.where(rng.random(absent.sum()) < 0.5, np.nan, np.inf)
        y[1, 0], dy[1, 0] = limits.min if logarithm else limits.smallest_subnormal, np.nan
        y[2, :2] = np.inf, np.nan
        dx = back(dy, y, out_dtype=out.name)
        found = dx[absent].astype(np.float32)
        assert (found == 0).all() and not np.signbit(found).any()
        numbers = np.isfinite(dx.astype(np.float32))
        assert numbers[[0, 3]].all() and not numbers[1][~absent[1]].any() and not numbers[2, :2].any()
        # Of its logarithm, a row's sum is that of dy.
        assert numbers[2][~absent[2]].sum() == ((~absent[2]).sum() - 2 if logarithm else 0)
