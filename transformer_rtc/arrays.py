"""Arrays of any framework, without importing one: what they are, where outputs come from, which stream they are on.

The native call handles arrays whose type has DLPack's exchange table (torch) on a GPU. `call` handles the rest.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _native
from .errors import AllocationError, ArgumentError, DeviceNotFoundError, shown
from .spec import BFLOAT16, BOOL, DTYPES, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8, UINT8, DType

if TYPE_CHECKING:
    from .request import Argument

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
HOST = -1  # the device of arrays that are simulated
_ON_HOST, _ON_GPU = (_CPU, _CUDA_HOST), (_CUDA, _CUDA_MANAGED)
_TYPESTRS = {
    "<f4": FLOAT32.id,
    "<f2": FLOAT16.id,
    "|i1": INT8.id,
    "|u1": UINT8.id,
    "|b1": BOOL.id,
}  # of the array interface protocols
_OF_ML_DTYPES = (BFLOAT16.id, FLOAT8_E4M3.id, FLOAT8_E5M2.id)  # what numpy itself has no type for
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


class RawView(NamedTuple):
    """An array as its framework tells it. Strides are in elements; `device_type` is DLPack's."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    device_type: int
    device: int
    read_only: bool


def dtype_id(dtype: object) -> int:
    """Return the id (`transformer_rtc.spec.DType.id`) of a data type: torch's, numpy's, CuPy's, JAX's, or its name.

    Raises
    ------
    ArgumentError
        If it is none that operators know.
    """
    name = ""
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    # numpy would take an array for its data type.
    if name not in _BY_NAME and not isinstance(dtype, np.generic) and not hasattr(type(dtype), "__dlpack__"):
        try:
            found = np.dtype(dtype)  # type: ignore[call-overload]
            name = found.name if found.isnative else ""
        except Exception:  # numpy parses what it is given, and fails in many ways
            name = ""
    if name not in _BY_NAME:
        raise ArgumentError(f"a data type must be one of {', '.join(_BY_NAME)}; it is {shown(dtype)}")
    return _BY_NAME[name].id


def _numpy_dtype(dtype: int) -> np.dtype[Any]:
    if dtype in _OF_ML_DTYPES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, DTYPES[dtype].name))
        return found
    return _storage_dtype(dtype)


def _storage_dtype(dtype: int) -> np.dtype[Any]:
    """Return numpy's own type of the same size: for bfloat16 uint16, for 8-bit floats and workspaces uint8."""
    if dtype in DTYPES and dtype not in _OF_ML_DTYPES:
        return np.dtype(DTYPES[dtype].name)
    return np.dtype(np.uint16 if dtype == BFLOAT16.id else np.uint8)


def _element_strides(
    strides: Sequence[int] | None, shape: tuple[int, ...], size: int, argument: str
) -> tuple[int, ...]:
    if strides is None:
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(stride % size for stride in strides):
        raise ArgumentError(
            f"{argument} must have strides that are multiples of its elements' size; they are {strides}"
        )
    return tuple(stride // size for stride in strides)


def framework_of(type_: type, argument: str) -> tuple[object, object]:
    """Return what the native call may use for arrays of a type: (exchange table or None, is_grad_enabled or None).

    Raises
    ------
    ArgumentError
        If it is a subclass of a framework's array: the table it inherits may not tell all that it is.
    """
    table = "__dlpack_c_exchange_api__"
    if not hasattr(type_, table):
        return None, None
    torch = sys.modules.get("torch")
    of_torch = torch is not None and issubclass(type_, torch.Tensor)
    # A parameter or a buffer is a tensor that a module registers, and no more.
    plain = torch is not None and type_ in (torch.nn.Parameter, getattr(torch.nn, "Buffer", None))
    if table not in type_.__dict__ and not plain:
        raise ArgumentError(
            f"{argument} is a {type_.__module__}.{type_.__qualname__}, a subclass whose memory may not be all there is "
            f"to it (a fake or wrapped tensor, say): pass a plain array, such as .as_subclass(torch.Tensor)"
        )
    return getattr(type_, table), torch.is_grad_enabled if torch is not None and of_torch else None


class _Framework:
    """What `call` asks of a framework. One instance serves one call.

    Attributes
    ----------
    capturable : bool
        Whether its arrays can be part of a graph that a stream is captured into.
    graph_memory : bool
        Whether what it allocates during a capture belongs to the graph, also when nobody holds it any more.
    capturing : bool
        Whether the call's stream is being captured.
    """

    capturable = True
    graph_memory = False

    def __init__(self, accepted: Mapping[str, tuple[DType, ...]]) -> None:
        self.capturing = False
        self._accepted = accepted  # data types, by what messages call an argument

    def _dtype_of(self, dtype: object, argument: str) -> int:
        with contextlib.suppress(ArgumentError):
            return dtype_id(dtype)
        names = ", ".join(accepted.name for accepted in self._accepted[argument])
        raise ArgumentError(f"{argument} must be one of {names}; it is {dtype}")

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        """View an array; what makes it is waited for by `stream`, or by the caller where that is None."""
        raise NotImplementedError

    def place(self, array: Any, argument: str) -> tuple[int, int]:
        """Return where an array is: (DLPack device type, device)."""
        view = self.view(array, argument, None)
        return view.device_type, view.device

    def stream(self, device: int) -> int:
        """Return the stream that the framework would use now."""
        raise NotImplementedError

    @contextlib.contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        """Allocate on a device, for use on a stream."""
        yield

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        """Return a new array and its pointer."""
        raise NotImplementedError

    def finish(self, outputs: tuple[Any, ...], stream: int, arrays: list[object]) -> tuple[Any, ...]:
        """Return what the user gets."""
        return outputs

    def from_host(self, array: np.ndarray[Any, Any], dtype: int) -> object:
        """Return a host array, of the storage type, as the framework's own."""
        return array.view(_numpy_dtype(dtype))

    def check_out(self, argument: str) -> None:
        """Refuse an output given by the user where arrays are immutable."""


class _Torch(_Framework):
    # Tensors on the host, calls with a stream of their own, and versions without an exchange table.
    graph_memory = True

    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        torch = sys.modules["torch"]
        framework_of(type(array), argument)
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
        device_type, ordinal = (_CUDA, device.index) if device.type == "cuda" else (_CPU, 0)
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
        signed = array.view(np.int16) if dtype == BFLOAT16.id else array
        return torch.from_numpy(signed).view(getattr(torch, DTYPES[dtype].name))


class _Cupy(_Framework):
    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        dtype = self._dtype_of(array.dtype, argument)
        strides = _element_strides(array.strides, array.shape, array.itemsize, argument)
        return RawView(array.data.ptr, array.shape, strides, dtype, _CUDA, array.device.id, False)

    def stream(self, device: int) -> int:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)

    @contextlib.contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device):
            if stream == cuda.get_current_stream(device).ptr:
                yield
            else:
                with cuda.ExternalStream(stream, device):
                    yield

    def empty(self, shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        try:
            made = sys.modules["cupy"].empty(shape, _numpy_dtype(dtype))
        except (MemoryError, ValueError) as error:
            raise AllocationError(f"CuPy could not allocate an output: {error}") from error
        return made, made.data.ptr


class _Numpy(_Framework):
    def view(self, array: Any, argument: str, stream: int | None) -> RawView:
        if isinstance(array, np.ma.MaskedArray):
            raise ArgumentError(f"{argument} must have no mask; pass its .filled()")
        if not array.dtype.isnative:
            raise ArgumentError(f"{argument} must have the machine's byte order; it is {array.dtype.str}")
        dtype = self._dtype_of(array.dtype, argument)
        strides = _element_strides(array.strides, array.shape, array.itemsize, argument)
        return RawView(array.ctypes.data, array.shape, strides, dtype, _CPU, 0, not array.flags.writeable)


class DeviceArray:
    """An array in device memory that this package allocated, for callers whose framework cannot be asked to.

    It speaks ``__dlpack__`` and, but for bfloat16 and 8-bit floats, ``__cuda_array_interface__``.

    Attributes
    ----------
    shape : tuple of int
        It is row-major without gaps.
    dtype : str
        The element type's name.
    device : int
        The device's ordinal.
    """

    def __init__(self, buffer: _native.Buffer, shape: tuple[int, ...], dtype: int, stream: int | None) -> None:
        self.shape, self.device, self.dtype = shape, buffer.device, _native.dtype_name(dtype)
        self._buffer, self._dtype = buffer, dtype
        self._made: _native.Event | None = None
        for typestr, known in _TYPESTRS.items():
            if known == dtype:
                self.__cuda_array_interface__ = {
                    "shape": shape, "typestr": typestr, "data": (buffer.pointer, False), "strides": None,
                    "stream": stream, "version": 3,
                }  # fmt: skip

    def made_on(self, stream: int) -> None:
        """Remember when the work that makes the array is done: what is on a stream now."""
        self._made = _native.Event(self.device, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Return a DLPack capsule; `stream` waits for the work that makes the array."""
        if stream != -1 and self._made is not None:
            self._made.precede(1 if stream is None else stream)
        return _native.to_dlpack(self._buffer, self.shape, self._dtype)


@contextlib.contextmanager
def _context_kept() -> Iterator[None]:
    """Keep this thread's current context, whatever another package makes current, as JAX does its array's device."""
    context = _native.current_context()
    try:
        yield
    finally:
        _native.set_current_context(context)


class _Protocol(_Framework):
    # Whatever speaks DLPack or the CUDA array interface. Outputs are DeviceArrays.
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
            waiting = stream if device_type in _ON_GPU else None
            if self.capturing:
                waiting = -1  # a graph cannot wait for what is outside: whoever replays it does
            try:
                with _context_kept() if stream is not None else contextlib.nullcontext():
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
        if typestr not in _TYPESTRS or interface.get("mask") is not None:
            raise ArgumentError(
                f"{argument} must have elements of {', '.join(_TYPESTRS)} and no mask; they are {typestr}"
            )
        dtype = _TYPESTRS[typestr]
        _check_addressable(pointer, shape, strides, DTYPES[dtype].bytes, argument)
        device = _native.pointer_device(pointer) if 0 not in shape else _native.current_device()
        if stream is not None and not self.capturing and made_on not in (None, stream):
            _native.order_streams(device, made_on, stream)
        of_elements = _element_strides(strides, shape, DTYPES[dtype].bytes, argument)
        return RawView(pointer, shape, of_elements, dtype, _CUDA, device, read_only)

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


# What calls on a stream of our own read, until they are done.
_in_flight: deque[tuple[_native.Event, list[object]]] = deque()
_in_flight_lock = threading.Lock()


class _Jax(_Protocol):
    capturable = False  # it moves and reuses memory as it likes

    def __init__(self, accepted: Mapping[str, tuple[DType, ...]]) -> None:
        super().__init__(accepted)
        self._first: Any = None  # array of the call

    def place(self, array: Any, argument: str) -> tuple[int, int]:
        # A tracer answers hasattr with what its array would have.
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise ArgumentError(f"{argument} is a JAX tracer: call this operator outside of jit, vmap and grad")
        if self._first is None:
            self._first = array
        return super().place(array, argument)

    def stream(self, device: int) -> int:
        return _native.own_stream(device)

    def check_out(self, argument: str) -> None:
        raise ArgumentError(f"{argument} is a JAX array, and those are immutable: leave it out")

    def finish(self, outputs: tuple[Any, ...], stream: int, arrays: list[object]) -> tuple[Any, ...]:
        # JAX may reuse an input's memory as soon as nobody holds it, whatever a stream of ours still does.
        event = _native.Event(outputs[0].device, stream)
        with _in_flight_lock:
            while _in_flight and _in_flight[0][0].done():
                _in_flight.popleft()
            _in_flight.append((event, [*arrays, *self._held]))
        outputs = super().finish(outputs, stream, arrays)
        from_dlpack = sys.modules["jax"].dlpack.from_dlpack
        with _context_kept():
            return tuple(from_dlpack(output) for output in outputs)

    def from_host(self, array: np.ndarray[Any, Any], dtype: int) -> object:
        (device,) = self._first.devices()  # one that is sharded has no DLPack
        return sys.modules["jax"].device_put(super().from_host(array, dtype), device)


# Of each package: whose arrays they are, and their type.
_FRAMEWORKS: dict[str, tuple[type[_Framework], str, str]] = {
    "torch": (_Torch, "torch", "Tensor"), "cupy": (_Cupy, "cupy", "ndarray"), "jax": (_Jax, "jax", "Array"),
    "jaxlib": (_Jax, "jax", "Array"), "numpy": (_Numpy, "numpy", "ndarray"),
}  # fmt: skip


def _framework_type(array: object, argument: str) -> type[_Framework]:
    for type_ in type(array).__mro__:
        found, package, name = _FRAMEWORKS.get(str(type_.__module__).partition(".")[0], (None, "", ""))
        # Not everything of a package is an array, such as torch.float32 or a module.
        if found is not None and isinstance(array, getattr(sys.modules.get(package), name, ())):
            return found
    protocols = (getattr(array, name, None) for name in ("__dlpack__", "__cuda_array_interface__"))
    if not isinstance(array, type) and any(protocol is not None for protocol in protocols):
        return _Protocol
    raise ArgumentError(
        f"{argument} must be an array (torch, CuPy, JAX, numpy, or one with __dlpack__ or __cuda_array_interface__); "
        f"it is a {_type_name(array)}"
    )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def stream_handle(stream: object, operator: str) -> int:
    """Return the handle of a stream: an int, ``__cuda_stream__``, ``.cuda_stream`` (torch) or ``.ptr`` (CuPy).

    Raises
    ------
    ArgumentError
        If it is none of these.
    """
    handles: list[object] = []
    with contextlib.suppress(Exception):  # another package's code
        protocol = getattr(stream, "__cuda_stream__", None)
        answer = protocol() if callable(protocol) else protocol
        if isinstance(answer, tuple) and len(answer) == 2 and answer[0] == 0:
            handles.append(answer[1])
    handles += [stream, getattr(stream, "cuda_stream", None), getattr(stream, "ptr", None)]
    for handle in handles:
        if isinstance(handle, int) and not isinstance(handle, bool) and 0 <= handle < 2**64:
            return handle
    raise ArgumentError(
        f"{operator}: stream must be a handle (an int), or have __cuda_stream__, .cuda_stream or .ptr; it is "
        f"{shown(stream)}"
    )


def _check_addressable(
    pointer: int, shape: Sequence[int], strides: Sequence[int] | None, size: int, argument: str
) -> None:
    """Refuse what describes no memory: `strides` are in the unit of `size` bytes, or dense where they are None."""
    if strides is None:
        reach = math.prod(shape)
    elif len(strides) != len(shape):
        raise ArgumentError(f"{argument} has {len(shape)} dimensions and {len(strides)} strides")
    else:
        reach = 1 + sum(abs(stride) * max(0, extent - 1) for extent, stride in zip(shape, strides, strict=True))
    elements = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= pointer < 2**64 or max(reach, elements) * size >= 2**62:
        raise ArgumentError(
            f"{argument} must lie in memory that can be addressed; it is at {pointer:#x} with the shape {tuple(shape)}"
        )


_MADE = ("row_values", "column_values", "head_sums", "mask_sums")  # roles of arrays that the caller never gives
_GIVEN = (
    "rows",
    "columns",
    "row_inputs",
    "value",
    "mask",
    "head_values",
    "rows_out",
    "value_out",
)  # roles of arrays of the caller's
_WRITTEN = ("rows_out", "value_out")  # roles of arrays that are written where the caller gives them


class GivenArray(NamedTuple):
    """An array among a call's arguments."""

    name: str  # what messages call it
    array: Any  # None where it is left out
    written: bool  # where the caller gives it
    dtypes: tuple[DType, ...]


def _arrays_of(
    operator: str, arguments: Sequence[Argument], values: tuple[Any, ...]
) -> tuple[list[GivenArray], int | None]:
    """Return the arrays of a call, one for each argument that is an array; and the handle of the stream it is given."""
    arrays: list[GivenArray] = []
    stream = None
    for argument, value in zip(arguments, values, strict=True):
        name, written = f"{operator}: {argument.keyword}", argument.role in _WRITTEN
        if argument.role == "stream":
            stream = None if value is None else stream_handle(value, operator)
        elif argument.role in _MADE:
            arrays.append(GivenArray(argument.name, None, written, ()))
        elif argument.role in _GIVEN:
            if value is None and not written and not argument.optional:
                raise ArgumentError(f"{name} must be an array; it is None")
            arrays.append(GivenArray(name, value, written, argument.dtypes))
    return arrays, stream


_ZEROS = np.zeros(16, np.uint8)


class _Mirror:
    """Host memory copied to a device as it lies, so that strides, alignment and overlap stay what they are."""

    def __init__(self, views: Sequence[RawView | None], device: int, stream: int) -> None:
        self._device, self._stream = device, stream
        spans = sorted(self._span(view) for view in views if view is not None and 0 not in view.shape)
        merged: list[list[int]] = []
        for low, high in spans:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        # Where host memory begins and ends; and its copy, from the 256-byte boundary before that on, so that what is
        # aligned here is aligned there.
        self._copies: list[tuple[int, int, _native.Buffer]] = []
        for low, high in merged:
            offset = low % 256
            buffer = _native.Buffer(device, offset + high - low)
            buffer.copy_from_host(offset, low, high - low, stream)
            # Kernels may read an array's first block of 16 bytes whole, though they use nothing of what is before it.
            if low % 16:
                buffer.copy_from_host(offset // 16 * 16, _ZEROS.ctypes.data, low % 16, stream)
            self._copies.append((low, high, buffer))

    @staticmethod
    def _span(view: RawView) -> tuple[int, int]:
        size = DTYPES[view.dtype].bytes
        reach = [(extent - 1) * stride * size for extent, stride in zip(view.shape, view.strides, strict=True)]
        return view.pointer + sum(min(0, way) for way in reach), view.pointer + sum(max(0, way) for way in reach) + size

    def _copy(self, view: RawView) -> tuple[int, int, _native.Buffer]:
        return next(copy for copy in self._copies if copy[0] <= view.pointer < copy[1])

    def view(self, view: RawView) -> _native.View:
        """Return the device's view of a host view."""
        pointer = 0
        if 0 not in view.shape:
            low, _, buffer = self._copy(view)
            pointer = buffer.pointer + low % 256 + view.pointer - low
        return _native.View(pointer, view.shape, view.strides, view.dtype, self._device, view.read_only)

    def copy_back(self, view: RawView) -> None:
        """Copy a view's elements, and no others, back to the host."""
        if 0 in view.shape:
            return
        low, high, buffer = self._copy(view)
        memory = np.empty(high - low, np.uint8)
        buffer.copy_to_host(low % 256, memory.ctypes.data, memory.nbytes, self._stream)
        _native.synchronize_stream(self._device, self._stream)
        _host_array(view)[...] = _host_array(view._replace(pointer=memory.ctypes.data + view.pointer - low))


def _call_simulated(
    native: _native.Operator,
    arrays: list[GivenArray],
    views: list[RawView | None],
    values: tuple[Any, ...],
    framework: _Framework,
) -> object:
    made: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def empty(shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        array = _host_memory(shape, _storage_dtype(dtype))
        made[id(array)] = array, dtype
        return array, array.ctypes.data

    held = [
        None if view is None else (_native.View(*view[:4], HOST, view.read_only), given.array)
        for view, given in zip(views, arrays, strict=True)
    ]
    result = native.run_views(held, values, empty, 0)
    outputs = [
        framework.from_host(*made[id(output)]) if id(output) in made else output
        for output in (result if isinstance(result, tuple) else (result,))
    ]
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def _host_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise AllocationError(f"an output of the shape {shape} could not be allocated: {error}") from error


class _Made:
    """An output on the device that is yet to come back to the host."""

    def __init__(self, buffer: _native.Buffer, shape: tuple[int, ...], dtype: int) -> None:
        self.buffer, self.shape, self.dtype = buffer, shape, dtype


def _host_array(view: RawView) -> np.ndarray[Any, Any]:
    """Return host memory as numpy sees it, with the storage type."""
    dtype = _storage_dtype(view.dtype)

    class Memory:
        __array_interface__ = {
            "shape": view.shape, "typestr": dtype.str, "data": (view.pointer, view.read_only),
            "strides": tuple(stride * dtype.itemsize for stride in view.strides), "version": 3,
        }  # fmt: skip

    return np.asarray(Memory())


def call(
    native: _native.Operator,
    arguments: Sequence[Argument],
    values: tuple[Any, ...],
    simulating_on_host: Callable[[], contextlib.AbstractContextManager[None] | None],
) -> object:
    """Call an operator with arrays that need more than a pointer.

    Parameters
    ----------
    native : Operator
        The native operator.
    arguments : sequence of Argument
        Its descriptor.
    values : tuple
        The call's arguments, in that order.
    simulating_on_host : callable
        The context in which arrays of the host are simulated; None: they are staged through a GPU.
    """
    name = native.name
    arrays, stream = _arrays_of(name, arguments, values)
    first_name, first, _, _ = arrays[0]
    kind = _framework_type(first, first_name)
    framework = kind({given.name: given.dtypes for given in arrays})
    for argument_name, array, written, _ in arrays:
        if array is None:
            continue
        if _framework_type(array, argument_name) is not kind:
            raise ArgumentError(
                f"{argument_name} must be of the same framework as the {_type_name(first)} before it; it is a "
                f"{_type_name(array)}"
            )
        if written:
            framework.check_out(argument_name)

    device_type, device = framework.place(first, first_name)
    if device_type not in _ON_HOST + _ON_GPU:
        raise ArgumentError(f"{first_name} must be on a CUDA GPU or the host; its DLPack device type is {device_type}")
    on_host = device_type in _ON_HOST
    simulating = None
    if on_host:
        try:
            simulating = simulating_on_host()
        except DeviceNotFoundError as error:
            raise type(error)(f"{first_name} is on the host, and is staged through a GPU: {error}") from error
        if simulating is not None and stream is not None:
            raise ArgumentError(f"{name}: stream must be None: the simulator has no streams")
        device = HOST if simulating is not None else _native.current_device()
    if simulating is not None:
        stream = 0
    elif stream is not None and not _native.stream_on_device(device, stream):
        raise ArgumentError(f"{name}: stream belongs to another device or context than cuda:{device}")
    ours = on_host and stream is None  # what a graph never captures
    if stream is None:
        stream = _native.own_stream(device) if on_host else framework.stream(device)
    if simulating is None and not ours and _native.stream_capturing(device, stream):
        if on_host or not framework.capturable:
            raise ArgumentError(
                f"{first_name} is {'on the host' if on_host else f'a {_type_name(first)}'}, which cannot be part of "
                f"the graph that the stream is being captured into: pass an array on the GPU of torch, CuPy or another "
                f"framework whose memory stays where it is"
            )
        framework.capturing = True

    views: list[RawView | None] = []
    for argument_name, array, _, _ in arrays:
        view = None
        if array is not None:
            view = framework.view(array, argument_name, None if on_host else stream)
            if view.device_type not in (_ON_HOST if on_host else _ON_GPU):
                raise ArgumentError(
                    f"{argument_name} must be on the {'host' if on_host else 'GPU'}, like the array before it"
                )
            _check_addressable(view.pointer, view.shape, view.strides, DTYPES[view.dtype].bytes, argument_name)
        views.append(view)

    if simulating is not None:
        with simulating:
            return _call_simulated(native, arrays, views, values, framework)
    if on_host:
        return _call_on_host(native, arrays, views, values, framework, device, stream)
    held = [
        None if view is None else (_native.View(*view[:4], view.device, view.read_only), given.array)
        for view, given in zip(views, arrays, strict=True)
    ]
    with framework.allocating(device, stream):
        graph_memory = framework.capturing and not framework.graph_memory
        result = native.run_views(held, values, framework.empty, stream, graph_memory)
    made = result if isinstance(result, tuple) else (result,)
    made = framework.finish(made, stream, [given.array for given in arrays])
    return made if isinstance(result, tuple) else made[0]


def _call_on_host(
    native: _native.Operator,
    arrays: list[GivenArray],
    views: list[RawView | None],
    values: tuple[Any, ...],
    framework: _Framework,
    device: int,
    stream: int,
) -> object:
    mirror = _Mirror(views, device, stream)

    def empty(shape: tuple[int, ...], dtype: int, device: int) -> tuple[object, int]:
        buffer = _native.Buffer(device, math.prod(shape) * _storage_dtype(dtype).itemsize)
        return _Made(buffer, shape, dtype), buffer.pointer

    held = [
        None if view is None else (mirror.view(view), given.array) for view, given in zip(views, arrays, strict=True)
    ]
    result = native.run_views(held, values, empty, stream)
    for view, given in zip(views, arrays, strict=True):
        if given.written and view is not None:
            mirror.copy_back(view)
    outputs: list[object] = []
    for output in result if isinstance(result, tuple) else (result,):
        if isinstance(output, _Made):
            host = _host_memory(output.shape, _storage_dtype(output.dtype))
            output.buffer.copy_to_host(0, host.ctypes.data, host.nbytes, stream)
            _native.synchronize_stream(device, stream)
            outputs.append(framework.from_host(host, output.dtype))
        else:
            outputs.append(output)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]
