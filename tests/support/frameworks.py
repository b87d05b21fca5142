# SPDX-License-Identifier: Apache-2.0
"""Arrays of each framework: from numpy and back, bit by bit, and with memory around them that must not change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cases import Case
from reference import NUMPY_TYPES, random_rows, random_weight

from transformer_rtc.spec import DType

BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits(host: np.ndarray) -> np.ndarray:
    """Return elements as integers, so that NaN and the sign of zero count."""
    return np.ascontiguousarray(host).view(BITS[host.itemsize])


def inputs(
    rng: np.random.Generator, case: Case, leading: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return random x and weight of a case, with other leading dimensions where given."""
    shape = (*((case.rows,) if leading is None else leading), case.hidden)
    weight = None if case.weight is None else random_weight(rng, case.hidden, case.weight)
    return random_rows(rng, shape, case.x), weight


def capture(graph: Any, **options: Any) -> Any:
    """Return torch's capture into a graph, which other threads of the process cannot end.

    In torch's default mode, one of JAX's that asks for its streams does: CUDA_LOG_FILE shows such calls.
    """
    import torch

    return torch.cuda.graph(graph, capture_error_mode="thread_local", **options)


class Framework:
    """numpy, and what others do otherwise."""

    name = "numpy"
    reverses = True  # whether an array may have negative strides

    def dtype(self, dtype: DType) -> Any:
        return NUMPY_TYPES[dtype]

    def array(self, host: np.ndarray) -> Any:
        return host.copy()

    def host(self, array: Any) -> np.ndarray:
        assert type(array) is np.ndarray
        return array

    def is_dense(self, array: Any) -> bool:
        return array.flags.c_contiguous

    def rows(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return rows of random numbers."""
        return random_rows(rng, shape, dtype)

    def of_ones(self, elements: int, itemsize: int) -> Any:
        """Return integers of which all bits are set, from an address on that is aligned to 512 bytes."""
        memory = np.full(elements + 512 // itemsize, -1, BITS[itemsize])
        return memory[-memory.ctypes.data % 512 // itemsize :]

    def strided(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        """Return a view of an array of one dimension; strides are in elements."""
        plain = flat.view(BITS[flat.itemsize])  # as_strided does not know every type
        bytes_apart = [stride * flat.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(plain[start:], shape, bytes_apart).view(flat.dtype)

    def changed(self, memory: Any) -> Any:
        """Return where not all bits are set."""
        return np.flatnonzero(memory != -1)


class Torch(Framework):
    name = "torch"
    reverses = False

    def __init__(self) -> None:
        self.module = pytest.importorskip("torch")

    def dtype(self, dtype: DType) -> Any:
        return getattr(self.module, dtype.name)

    def array(self, host: np.ndarray) -> Any:
        # torch knows no ml_dtypes: the bits travel as integers.
        return self.module.from_numpy(bits(host)).cuda().view(getattr(self.module, host.dtype.name))

    def host(self, array: Any) -> np.ndarray:
        assert type(array) is self.module.Tensor and array.is_cuda
        name = str(array.dtype).removeprefix("torch.")
        numpy_type = next(found for dtype, found in NUMPY_TYPES.items() if dtype.name == name)
        return self.integers(array).contiguous().cpu().numpy().view(numpy_type)

    def integers(self, array: Any) -> Any:
        """Return elements as integers, as `bits` does."""
        return array.view(getattr(self.module, f"int{8 * array.itemsize}"))

    def is_dense(self, array: Any) -> bool:
        return array.is_contiguous()

    def rows(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Any:
        generator = self.module.Generator("cuda").manual_seed(int(rng.integers(2**31)))
        return self.module.empty(shape, dtype=self.dtype(dtype), device="cuda").normal_(generator=generator)

    def of_ones(self, elements: int, itemsize: int) -> Any:
        memory = self.module.full((elements,), -1, dtype=getattr(self.module, f"int{8 * itemsize}"), device="cuda")
        assert memory.data_ptr() % 512 == 0
        return memory

    def strided(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        return self.module.as_strided(flat, shape, strides, flat.storage_offset() + start)

    def changed(self, memory: Any) -> Any:
        return (memory != -1).nonzero().flatten().cpu().numpy()


class Cupy(Framework):
    name = "cupy"

    def __init__(self) -> None:
        self.module = pytest.importorskip("cupy")

    def array(self, host: np.ndarray) -> Any:
        return self.module.asarray(bits(host)).view(host.dtype)

    def host(self, array: Any) -> np.ndarray:
        assert type(array) is self.module.ndarray
        dtype = np.dtype(array.dtype)
        return self.module.asnumpy(self.module.ascontiguousarray(array).view(BITS[dtype.itemsize])).view(dtype)


class Jax(Framework):
    name = "jax"

    def __init__(self) -> None:
        self.module = pytest.importorskip("jax")
        if self.module.default_backend() != "gpu":
            pytest.skip("this JAX sees no GPU")

    def array(self, host: np.ndarray) -> Any:
        return self.module.numpy.asarray(host)

    def host(self, array: Any) -> np.ndarray:
        assert isinstance(array, self.module.Array)
        assert {device.platform for device in array.devices()} == {"gpu"}
        return np.asarray(array)


FRAMEWORKS = {kind.name: kind for kind in (Torch, Cupy, Jax, Framework)}


class Guarded:
    """An array of NaN, of any strides and alignment, in memory that must not change around it.

    Strides are in elements, row-major by default, and `offset` is elements beyond an address that is aligned to 512
    bytes.
    """

    GUARD = 512  # elements on either side

    def __init__(
        self,
        kind: Framework,
        shape: tuple[int, ...],
        dtype: DType,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        if strides is None:
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        ways = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        low, high = sum(min(0, way) for way in ways), sum(max(0, way) for way in ways)
        # All bits set is a NaN of every type that has one.
        self._kind, self._memory = kind, kind.of_ones(high - low + 1 + offset + 2 * self.GUARD, dtype.bytes)
        self._bits = kind.strided(self._memory, shape, strides, self.GUARD + offset - low)
        self.array = self._bits.view(kind.dtype(dtype))

    def fill(self, host: np.ndarray) -> Guarded:
        self._bits[...] = self._kind.array(bits(host).reshape(host.shape))
        return self

    def assert_intact_around(self) -> None:
        """Check every byte that is not the array's; what the array held is lost."""
        self._bits[...] = -1
        changed = self._kind.changed(self._memory)
        assert changed.size == 0, f"elements {changed[:8]} around the array were written, {changed.size} in all"
