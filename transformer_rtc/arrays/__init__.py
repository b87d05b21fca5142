# SPDX-License-Identifier: Apache-2.0
"""Arrays of any framework, without importing one: what they are, where outputs come from, which stream they are on.

The native call handles arrays whose type has DLPack's exchange table (torch) on a GPU. `call` handles the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .device_array import DeviceArray
from .dlpack import HOST, framework_of, loses_gradient
from .dtypes import dtype_id

if TYPE_CHECKING:
    from .calls import call

__all__ = ["HOST", "DeviceArray", "call", "dtype_id", "framework_of", "loses_gradient"]


def __getattr__(name: str) -> object:
    # Imported when it is first used: a process whose arrays the native call handles never does.
    if name != "call":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = import_module(".calls", __name__).call
    return found
