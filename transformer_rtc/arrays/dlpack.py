"""What DLPack says of an array before its framework is asked: its kind of device, and its type's exchange table."""

from __future__ import annotations

import sys

from ..errors import ArgumentError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
HOST = -1  # the device of arrays that are simulated
ON_HOST, ON_GPU = (CPU, CUDA_HOST), (CUDA, CUDA_MANAGED)


def loses_gradient(value: object) -> bool:
    """Whether a number is a tensor of torch's that requires grad, while grad mode is on."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def framework_of(type_: type, argument: str) -> tuple[object, object, object]:
    """Return what the native call may use for arrays of a type.

    Returns
    -------
    exchange_table, is_grad_enabled, was_written : object or None
        The last is called with each array of the caller's that was written.

    Raises
    ------
    ArgumentError
        If it is a subclass of a framework's array: the table it inherits may not tell all that it is.
    """
    table = "__dlpack_c_exchange_api__"
    if not hasattr(type_, table):
        return None, None, None
    torch = sys.modules.get("torch")
    of_torch = torch is not None and issubclass(type_, torch.Tensor)
    # A parameter or a buffer is a tensor that a module registers, and no more.
    plain = torch is not None and type_ in (torch.nn.Parameter, getattr(torch.nn, "Buffer", None))
    if table not in type_.__dict__ and not plain:
        raise ArgumentError(
            f"{argument} is a {type_.__module__}.{type_.__qualname__}, a subclass whose memory may not be all there is "
            f"to it (a fake or wrapped tensor, say): pass a plain array, such as .as_subclass(torch.Tensor)"
        )
    if torch is None or not of_torch:
        return getattr(type_, table), None, None
    # Else autograd would use what it saved before that was overwritten.
    return getattr(type_, table), torch.is_grad_enabled, torch.autograd.graph.increment_version
