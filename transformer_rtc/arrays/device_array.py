# SPDX-License-Identifier: Apache-2.0
"""Our own arrays on a device."""

from __future__ import annotations

from typing import Any

from .. import _native
from .dlpack import CUDA
from .dtypes import TYPESTRS


class DeviceArray:
    """An array in device memory that this package allocated, for callers whose framework cannot allocate it.

    It has ``__dlpack__`` and, except for bfloat16 and 8-bit floats, ``__cuda_array_interface__``.

    Attributes
    ----------
    shape : tuple of int
        The sizes of its dimensions. The array is row-major without gaps.
    dtype : str
        The element type's name.
    device : int
        The device's ordinal.

    Examples
    --------
    >>> import numpy as np
    >>> from transformer_rtc import DeviceArray, rms_norm
    >>> class Exporter:  # of a framework that the package does not know
    ...     def __init__(self, array):
    ...         self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__
    >>> y = rms_norm(Exporter(np.ones((2, 8), np.float32)))
    >>> type(y)  # of memory on the host; on a GPU y is a DeviceArray, which torch.from_dlpack(y) takes
    <class 'numpy.ndarray'>
    """

    __module__ = "transformer_rtc.arrays"  # messages name the class by this, whichever file it is in

    shape: tuple[int, ...]
    dtype: str
    device: int
    __cuda_array_interface__: dict[str, Any]

    def __init__(self, buffer: _native.Buffer, shape: tuple[int, ...], dtype: int, stream: int | None) -> None:
        self.shape, self.device, self.dtype = shape, buffer.device, _native.dtype_name(dtype)
        self._buffer, self._dtype = buffer, dtype
        self._made: _native.Event | None = None
        for typestr, known in TYPESTRS.items():
            if known == dtype:
                self.__cuda_array_interface__ = {
                    "shape": shape, "typestr": typestr, "data": (buffer.pointer, False), "strides": None,
                    "stream": stream, "version": 3,
                }  # fmt: skip

    def made_on(self, stream: int) -> None:
        """Remember when the work that makes the array is done: what is on a stream now."""
        self._made = _native.Event(self.device, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Return a DLPack capsule; `stream` waits for the work that makes the array."""
        if stream != -1 and self._made is not None:
            self._made.precede(1 if stream is None else stream)
        return _native.to_dlpack(self._buffer, self.shape, self._dtype)
