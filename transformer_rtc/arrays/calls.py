# SPDX-License-Identifier: Apache-2.0
"""The call of an operator with arrays that need more than a pointer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _native
from ..arguments import OutputDType
from ..errors import ArgumentError, DeviceNotFoundError
from ..spec import DTYPES
from .detection import framework_type, type_name
from .dlpack import HOST, ON_GPU, ON_HOST
from .dtypes import dtype_id
from .framework import Framework, RawView, check_addressable
from .given import GivenArray, arrays_of
from .simulated import call_simulated
from .staged import call_staged

if TYPE_CHECKING:
    from ..declaration import Declaration


def call(
    native: _native.Operator,
    declaration: Declaration,
    values: tuple[Any, ...],
    simulating_on_host: Callable[[], contextlib.AbstractContextManager[None] | None],
    record: Callable[..., object] | None = None,
    dispatch: Callable[..., object] | None = None,
) -> object:
    """Call an operator with arrays that need more than a pointer.

    Parameters
    ----------
    native : Operator
        The native operator.
    declaration : Declaration
        What it is like.
    values : tuple
        The call's arguments, in that order.
    simulating_on_host : callable
        The context in which arrays of the host are simulated; None: they are staged through a GPU.
    record : callable, optional
        What calls the operator so that its framework records the gradient. None: it has seen to that.
    dispatch : callable, optional
        What calls the operator through its framework's dispatcher. None: that is where the call comes from.
    """
    name = native.name
    arrays, stream = arrays_of(name, declaration, values)
    first_name, first, _, _ = arrays[0]
    kind = framework_type(first, first_name)
    framework = kind({given.name: given.dtypes for given in arrays})
    for argument_name, array, written, _ in arrays:
        if array is None:
            continue
        if framework_type(array, argument_name) is not kind:
            raise ArgumentError(
                f"{argument_name} must be of the same framework as the {type_name(first)} before it; it is a "
                f"{type_name(array)}"
            )
        if written:
            framework.check_out(argument_name)
    for argument, value in zip(declaration.arguments, values, strict=True):
        if isinstance(argument, OutputDType) and value is not None:
            try:
                dtype = dtype_id(value)
            except ArgumentError:
                continue  # the native call says what it takes
            framework.check_dtype(dtype, f"{name}: {argument.keyword}")
    given_arrays = [given.array for given in arrays]
    if dispatch is not None and framework.dispatches(given_arrays):
        return dispatch(*values)
    if record is not None and declaration.gradient and framework.records(given_arrays):
        return record(*values)

    device_type, device = framework.place(first, first_name)
    if device_type not in ON_HOST + ON_GPU:
        raise ArgumentError(f"{first_name} must be on a CUDA GPU or the host; its DLPack device type is {device_type}")
    on_host = device_type in ON_HOST
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
                f"{first_name} is {'on the host' if on_host else f'a {type_name(first)}'}, which cannot be part of "
                f"the graph that the stream is being captured into: pass an array on the GPU of torch, CuPy or another "
                f"framework whose memory stays where it is"
            )
        framework.capturing = True

    views: list[RawView | None] = []
    for argument_name, array, _, _ in arrays:
        view = None
        if array is not None:
            view = framework.view(array, argument_name, None if on_host else stream)
            if view.device_type not in (ON_HOST if on_host else ON_GPU):
                raise ArgumentError(
                    f"{argument_name} must be on the {'host' if on_host else 'GPU'}, like the array before it"
                )
            check_addressable(view.pointer, view.shape, view.strides, DTYPES[view.dtype].bytes, argument_name)
        views.append(view)

    where = _Where(device, stream, on_host, simulating)
    found = _run(native, arrays, views, values, framework, where)
    for given in arrays:
        if given.written and given.array is not None:
            framework.was_written(given.array)
    return found


class _Where(NamedTuple):
    """Where a call runs."""

    device: int
    stream: int
    on_host: bool
    simulating: contextlib.AbstractContextManager[None] | None


def _run(
    native: _native.Operator,
    arrays: list[GivenArray],
    views: list[RawView | None],
    values: tuple[Any, ...],
    framework: Framework,
    where: _Where,
) -> object:
    """Run the native operator on views of the arrays, and return what the user gets."""
    if where.simulating is not None:
        with where.simulating:
            return call_simulated(native, arrays, views, values, framework)
    if where.on_host:
        return call_staged(native, arrays, views, values, framework, where.device, where.stream)
    held = [
        None if view is None else (_native.View(*view[:4], view.device, view.read_only), given.array)
        for view, given in zip(views, arrays, strict=True)
    ]
    with framework.allocating(where.device, where.stream):
        graph_memory = framework.capturing and not framework.graph_memory
        result = native.run_views(held, values, framework.empty, where.stream, graph_memory)
    made = result if isinstance(result, tuple) else (result,)
    made = framework.finish(made, where.stream, [given.array for given in arrays])
    return made if isinstance(result, tuple) else made[0]
