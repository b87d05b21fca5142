# SPDX-License-Identifier: Apache-2.0
"""From a request of addition to its kernels."""

from __future__ import annotations

from ...errors import ArgumentError
from ...request import LaunchRule, Request, StaticKernel
from ...spec import BOOL, INTEGERS, DeviceLimits, DType, KernelSpec
from ..tile import TileConfig
from . import general
from .kernels import AddSpec

__all__ = ["ArithmeticFamily"]

_DEFAULT = TileConfig(128, 4)
_OTHERS = tuple(TileConfig(threads, vectors) for threads in (128, 256, 512) for vectors in (1, 2, 4, 8))


def _rank(dtype: DType) -> int:
    """Return the category of a type, in the order of torch's: a result is not converted to a lower one."""
    return 0 if dtype is BOOL else 1 if dtype in INTEGERS else 2


class ArithmeticFamily:
    """The family of addition, as `Family` describes one."""

    name = "arithmetic"

    def check(self, request: Request) -> None:
        """Refuse what types and presence alone show to be wrong."""
        x, other, out = _types_of(request)
        if _rank(out) < max(_rank(x), _rank(other)):
            raise ArgumentError(
                f"{request.operator}: an output of {out.name} cannot hold a sum of {x.name} and {other.name}, as torch "
                f"converts no floating-point number to an integer, and no number to bool"
            )

    def case(self, request: Request) -> tuple[object, ...]:
        return "arithmetic", *(dtype.name for dtype in _types_of(request))

    def configurations(self, request: Request, limits: DeviceLimits) -> tuple[TileConfig, ...]:
        self.check(request)
        return tuple(dict.fromkeys((_DEFAULT, *_OTHERS)))

    def specialise(
        self, request: Request, limits: DeviceLimits, config: TileConfig | None = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        self.check(request)
        spec = AddSpec(*_types_of(request), config or _DEFAULT, request.unaligned)
        return ((spec, spec.launch_rule),)

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        self.check(request)
        return (general.launch(),)

    def static_program(self) -> str:
        return general.program()


def _types_of(request: Request) -> tuple[DType, DType, DType]:
    """Return the data types of x, other and y."""
    x, other, out = (request.dtypes[name] for name in ("x", "other", "out"))
    assert x and other and out
    return x, other, out
