# SPDX-License-Identifier: Apache-2.0
"""Arrays of torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import AllocationError, ArgumentError
from ..spec import BFLOAT16, DTYPES
from .dlpack import CPU, CUDA, asked_of_torch, is_wrapped
from .framework import Framework, RawView


class Torch(Framework):
    """Tensors on the host, calls with a stream of their own, and versions without an exchange table."""

    graph_memory = True

    def dispatches(self, arrays: Sequence[Any]) -> bool:
        asked = asked_of_torch()
        if asked.levels[asked.level] >= 0 or any(ask() for ask in (*asked.transforms, asked.of_gradients)):
            return True
        return any(_is_more_than_memory(array) for array in arrays if array is not None)

    def records(self, arrays: Sequence[Any]) -> bool:
        enabled: bool = sys.modules["torch"].is_grad_enabled()
        return enabled and any(array is not None and array.requires_grad for array in arrays)

    def was_written(self, array: Any) -> None:
        sys.modules["torch"].autograd.graph.increment_version(array)

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        torch = sys.modules["torch"]
        if torch.is_grad_enabled() and array.requires_grad:
            raise ArgumentError(
                f"{argument} requires grad, and this operator records no gradient: call it under torch.no_grad() or "
                f"torch.inference_mode(), or pass its .detach()"
            )
        device = array.device
        if device.type not in ("cuda", "cpu") or array.layout != torch.strided:
            raise ArgumentError(
                f"{argument} must be a strided tensor on a GPU or the host; it is {array.layout} on {device}"
            )
        device_type, ordinal = (CUDA, device.index) if device.type == "cuda" else (CPU, 0)
        dtype = self._dtype_of(array.dtype, argument)
        try:
            pointer, shape, strides = array.data_ptr(), tuple(array.shape), tuple(array.stride())
        except RuntimeError as error:
            raise ArgumentError(f"{argument} is a tensor without memory of its own: {error}") from error
        return RawView(pointer, shape, strides, dtype, device_type, ordinal, False)

    def stream(self, device: int) -> int:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)

    @contextlib.contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        cuda = sys.modules["torch"].cuda
        if stream == cuda.current_stream(device).cuda_stream:
            yield
        else:
            # torch's own name for the legacy default stream: it would take a null handle for a stream of its pool.
            external = stream not in (0, 1)
            with cuda.stream(cuda.ExternalStream(stream, device=device) if external else cuda.default_stream(device)):
                yield

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        torch = sys.modules["torch"]
        kind = getattr(torch, DTYPES[dtype].name) if dtype in DTYPES else torch.uint8
        try:
            made = torch.empty(shape, dtype=kind, device=f"cuda:{device}")
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise AllocationError(f"torch could not allocate an output: {error}") from error
        return made, made.data_ptr()

    def from_host(self, array: np.ndarray[Any, Any], dtype: int) -> object:
        torch = sys.modules["torch"]
        if array.size == 0:  # whose strides numpy makes zeros
            return torch.empty(array.shape, dtype=getattr(torch, DTYPES[dtype].name), device="cpu")
        signed = array.view(np.int16) if dtype == BFLOAT16.id else array
        return torch.from_numpy(signed).view(getattr(torch, DTYPES[dtype].name))


def _is_more_than_memory(array: Any) -> bool:
    """Whether a tensor's elements are not those in its memory, or it has none."""
    torch = sys.modules["torch"]
    if is_wrapped(type(array)) or array.device.type == "meta" or array.is_neg() or array._is_zerotensor():
        return True
    # One of a batch of gradients (is_grads_batched) has no mark but this.
    dense = array.layout == torch.strided and array.device.type in ("cuda", "cpu")
    return dense and not torch._C._has_storage(array)
