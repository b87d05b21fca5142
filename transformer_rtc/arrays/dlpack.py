# SPDX-License-Identifier: Apache-2.0
"""What DLPack says of an array before its framework is asked: its kind of device, and its type's exchange table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ArgumentError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
HOST = -1  # the device of arrays that are simulated
ON_HOST, ON_GPU = (CPU, CUDA_HOST), (CUDA, CUDA_MANAGED)


def loses_gradient(value: object) -> bool:
    """Whether a number is a tensor of torch's that requires grad, while grad mode is on."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


class Asked(NamedTuple):
    """What the native call asks torch each time.

    Attributes
    ----------
    is_grad_enabled : callable
        Whether gradients are recorded.
    was_written : callable
        Called with each array of the caller's that was written: else autograd would use what it saved before.
    transforms : tuple of callable
        Whether calls are traced, or transformed.
    of_gradients : callable
        The same, of a call whose gradient is recorded. Tensors of other transforms of functions have no memory that the
        native call could take: it leaves them to the slow call, which always asks.
    levels, level : dict and str
        As `transforms`, where this number of that dictionary is not negative.
    """

    is_grad_enabled: Callable[[], bool]
    was_written: Callable[[Any], object]
    transforms: tuple[Callable[[], object], ...]
    of_gradients: Callable[[], object]
    levels: dict[str, Any]
    level: str


def asked_of_torch() -> Asked:
    """Return what the native call asks torch."""
    torch = sys.modules["torch"]
    native = torch._C
    return Asked(
        is_grad_enabled=torch.is_grad_enabled,
        was_written=torch.autograd.graph.increment_version,
        # A mode such as FakeTensorMode or make_fx's; torch.jit.trace.
        transforms=(native._len_torch_dispatch_stack, native._is_tracing),
        of_gradients=native._functorch.peek_interpreter_stack,
        levels=torch.autograd.forward_ad.__dict__,
        level="_current_level",
    )


def is_wrapped(type_: type) -> bool:
    """Whether tensors of a type of torch's are more than their memory, such as a DTensor or a FakeTensor."""
    torch = sys.modules["torch"]
    # A parameter or a buffer is a tensor that a module registers, and no more.
    return type_ not in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", None))


def framework_of(type_: type, argument: str) -> tuple[object, bool, Asked | None]:
    """Return what the native call may use for arrays of a type.

    Returns
    -------
    exchange_table : object or None
        The framework's, if it has one.
    is_wrapped : bool
        Whether arrays of the type are more than their memory, and the framework must dispatch the call.
    asked : Asked or None
        What to ask the framework each time.

    Raises
    ------
    ArgumentError
        If it is a subclass of a framework's array: the table it inherits may not tell all that it is.
    """
    table = "__dlpack_c_exchange_api__"
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(type_, torch.Tensor):
        return getattr(type_, table, None), is_wrapped(type_), asked_of_torch()
    if not hasattr(type_, table):
        return None, False, None
    if table not in type_.__dict__:
        raise ArgumentError(
            f"{argument} is a {type_.__module__}.{type_.__qualname__}, a subclass whose memory may not be all there is "
            f"to it: pass a plain array"
        )
    return getattr(type_, table), False, None
