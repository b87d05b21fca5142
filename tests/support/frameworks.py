"""Arrays of each framework on the GPU: from numpy and back, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case
from reference import NUMPY_TYPES, random_rows, random_weight

from transformer_rtc.spec import DType

_BITS = {1: np.int8, 2: np.int16, 4: np.int32}


def bits(host: np.ndarray) -> np.ndarray:
    """Return elements as integers, so that NaN and the sign of zero count."""
    return np.ascontiguousarray(host).view(_BITS[host.itemsize])


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
    name = "numpy"

    def dtype(self, dtype: DType) -> Any:
        return NUMPY_TYPES[dtype]

    def array(self, host: np.ndarray) -> Any:
        return host.copy()

    def host(self, array: Any) -> np.ndarray:
        assert type(array) is np.ndarray
        return array


class Torch(Framework):
    name = "torch"

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


class Cupy(Framework):
    name = "cupy"

    def __init__(self) -> None:
        self.module = pytest.importorskip("cupy")

    def array(self, host: np.ndarray) -> Any:
        return self.module.asarray(bits(host)).view(host.dtype)

    def host(self, array: Any) -> np.ndarray:
        assert type(array) is self.module.ndarray
        dtype = np.dtype(array.dtype)
        return self.module.asnumpy(self.module.ascontiguousarray(array).view(_BITS[dtype.itemsize])).view(dtype)


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
    """A torch tensor of NaN, of any strides and alignment, in memory that must not change around it.

    Parameters
    ----------
    shape, strides : tuple of int
        Strides in elements, row-major by default.
    dtype : DType
        Of the elements.
    offset : int
        Elements beyond an address that is aligned to 512 bytes.
    """

    GUARD = 512  # elements on either side

    def __init__(
        self, shape: tuple[int, ...], dtype: DType, offset: int = 0, strides: tuple[int, ...] | None = None
    ) -> None:
        torch = pytest.importorskip("torch")
        if strides is None:
            strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
        integers = getattr(torch, f"int{8 * dtype.bytes}")
        # All bits set is a NaN of every type that has one.
        self._memory = torch.full((reach + offset + 2 * self.GUARD,), -1, dtype=integers, device="cuda")
        assert self._memory.data_ptr() % 512 == 0
        self._bits = torch.as_strided(self._memory, shape, strides, self.GUARD + offset)
        self.array = self._bits.view(getattr(torch, dtype.name))

    def fill(self, values: Any) -> Guarded:
        self.array.copy_(values)
        return self

    def assert_intact_around(self) -> None:
        """Check every byte that is not the tensor's; what the tensor held is lost."""
        self._bits.fill_(-1)
        changed = (self._memory != -1).nonzero().flatten().tolist()
        assert not changed, f"elements {changed[:8]} around the output were written, {len(changed)} in all"
