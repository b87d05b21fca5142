# SPDX-License-Identifier: Apache-2.0
"""Streams that callers give, and the context that is theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import _native
from ..errors import ArgumentError, shown


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


@contextlib.contextmanager
def context_kept() -> Iterator[None]:
    """Keep this thread's current context, whatever another package makes current, as JAX does its array's device."""
    context = _native.current_context()
    try:
        yield
    finally:
        _native.set_current_context(context)
