# SPDX-License-Identifier: Apache-2.0
"""Arrays of whatever speaks DLPack or the CUDA array interface."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from operator import index
from typing import Any

from .. import _native
from ..errors import ArgumentError
from ..spec import DTYPES, DType
from .device_array import DeviceArray
from .dlpack import CUDA, ON_GPU
from .dtypes import TYPESTRS
from .framework import Framework, RawView, check_addressable, element_strides
from .streams import context_kept


class Protocol(Framework):
    """Whatever speaks DLPack or the CUDA array interface. Outputs are of `DeviceArray`."""

    def __init__(self, accepted: Mapping[str, tuple[DType, ...]]) -> None:
        super().__init__(accepted)
        self._held: list[object] = []  # capsules: they own what is viewed
        self._stream = 0

    def place(self, array: Any, argument: str) -> tuple[int, int]:
        if not hasattr(array, "__dlpack__"):
            return super().place(array, argument)
        try:
            device_type, device = array.__dlpack_device__()
            return int(device_type), int(device)
        except Exception as error:  # another package's code
            raise ArgumentError(f"{argument} gives no access to its memory: {error}") from error

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        if hasattr(array, "__dlpack__"):
            device_type, _ = self.place(array, argument)
            waiting = stream if device_type in ON_GPU else None
            if self.capturing:
                waiting = -1  # a graph cannot wait for what is outside: whoever replays it does
            try:
                with context_kept() if stream is not None else contextlib.nullcontext():
                    try:
                        capsule = array.__dlpack__(stream=waiting, max_version=(1, 0))
                    except TypeError:  # a producer of the protocol's first version
                        capsule = array.__dlpack__(stream=waiting)
                view = RawView(*_native.read_dlpack(capsule))
            except Exception as error:  # another package's code
                raise ArgumentError(f"{argument} gives no access to its memory: {error}") from error
            self._held.append(capsule)
            if view.dtype not in DTYPES:
                names = ", ".join(accepted.name for accepted in self._accepted[argument])
                raise ArgumentError(f"{argument} must be one of {names}; it is {_native.dtype_name(view.dtype)}")
            return view
        try:
            interface = dict(array.__cuda_array_interface__)
            typestr, (pointer, read_only), shape = (
                str(interface["typestr"]), interface["data"], tuple(map(index, interface["shape"])),
            )  # fmt: skip
            pointer, read_only = index(pointer), bool(read_only)
            strides = None if interface.get("strides") is None else tuple(map(index, interface["strides"]))
            made_on = None if interface.get("stream") is None else index(interface["stream"])
        except Exception as error:  # another package's code
            raise ArgumentError(f"{argument} has no valid __cuda_array_interface__: {error!r}") from error
        if typestr not in TYPESTRS or interface.get("mask") is not None:
            raise ArgumentError(
                f"{argument} must have elements of {', '.join(TYPESTRS)} and no mask; they are {typestr}"
            )
        dtype = TYPESTRS[typestr]
        check_addressable(pointer, shape, strides, DTYPES[dtype].bytes, argument)
        device = _native.pointer_device(pointer) if 0 not in shape else _native.current_device()
        if stream is not None and not self.capturing and made_on not in (None, stream):
            _native.order_streams(device, made_on, stream)
        of_elements = element_strides(strides, shape, DTYPES[dtype].bytes, argument)
        return RawView(pointer, shape, of_elements, dtype, CUDA, device, read_only)

    def stream(self, device: int) -> int:
        return 1  # the legacy default stream, as both protocols assume

    @contextlib.contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        self._stream = stream
        yield

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        size = DTYPES[dtype].bytes if dtype in DTYPES else 1
        buffer = _native.Buffer(device, math.prod(shape) * size)
        return DeviceArray(buffer, shape, dtype, None if self.capturing else self._stream or 1), buffer.pointer

    def finish(self, outputs: tuple[Any, ...], stream: int, arrays: list[object]) -> tuple[Any, ...]:
        for output in outputs:
            if isinstance(output, DeviceArray) and not self.capturing:
                output.made_on(stream)
        return outputs
