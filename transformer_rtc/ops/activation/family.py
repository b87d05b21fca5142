# SPDX-License-Identifier: Apache-2.0
"""From a request of an activation to its kernels."""

from __future__ import annotations

from typing import NamedTuple

from ...declaration import MOST_COLUMNS
from ...errors import ArgumentError
from ...request import LaunchRule, Request, StaticKernel
from ...spec import FLOAT32, DeviceLimits, DType, KernelSpec
from ..scaling import EIGHT_BITS, check_scales
from ..tile import TileConfig
from . import general
from .kernels import ActivationSpec

__all__ = ["BUCKETS", "OPERATORS", "ActivationFamily", "ActivationOperator", "spec_of"]

# A row with a scale of its own has a CTA, of more threads from one of these lengths to the next.
BUCKETS = (2048, 4096, 8192, 16384, MOST_COLUMNS)
_THREADS = (128, 256, 512, 1024)


class ActivationOperator(NamedTuple):
    """What an operator computes.

    Attributes
    ----------
    function : str
        As `trtc::Function` names it.
    gated : bool
        Whether it is multiplied by a second array, or the second half of each row.
    backward : bool
        Whether it is the backward.
    """

    function: str
    gated: bool = False
    backward: bool = False


OPERATORS = {
    f"{name}{'_backward' if backward else ''}": ActivationOperator(function, gated, backward)
    for backward in (False, True)
    for name, function, gated in (
        ("gelu", "gelu", False),
        ("silu", "silu", False),
        ("relu_squared", "relu_squared", False),
        ("gelu_and_mul", "gelu", True),
        ("silu_and_mul", "silu", True),
    )
}


class ActivationFamily:
    """The family of activations, as `Family` describes one."""

    name = "activations"

    def check(self, request: Request) -> None:
        """Refuse what types and presence alone show to be wrong."""
        if not OPERATORS[request.operator].backward:
            check_scales(request, EIGHT_BITS)
        elif request.dtypes.get("dup") and not request.dtypes["up"]:
            raise ArgumentError(f"{request.operator}: return_dup needs up, whose gradient it is; up is None")

    def case(self, request: Request) -> tuple[object, ...]:
        spec = spec_of(request)
        bucket = request.columns if spec.kernel == "row_scaled" else 0
        sizes = tuple((name, dtype.bytes) for name, dtype in spec.arrays)
        return "activations", spec.kernel, spec.function, spec.gated, spec.packed, sizes, bucket

    def configurations(self, request: Request, limits: DeviceLimits) -> tuple[TileConfig, ...]:
        self.check(request)
        default = spec_of(request).config
        others = (TileConfig(threads, vectors) for threads in _THREADS for vectors in (1, 2, 4, 8))
        return tuple(dict.fromkeys((default, *others)))

    def specialise(
        self, request: Request, limits: DeviceLimits, config: TileConfig | None = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        self.check(request)
        spec = spec_of(request, config)
        return ((spec, spec.launch_rule),)

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        self.check(request)
        return (general.launch(spec_of(request), tuple(request.dtypes)),)

    def static_program(self) -> str:
        return general.program()


def spec_of(request: Request, config: TileConfig | None = None) -> ActivationSpec:
    """Return the kernel of a request, by a configuration or the default one."""
    operator = OPERATORS[request.operator]
    kernel = "backward" if operator.backward else "row_scaled" if request.dtypes.get("row_scale") else "forward"
    arrays: dict[str, DType] = {}
    for name, dtype in request.dtypes.items():
        if dtype is not None:
            arrays["dx" if operator.backward and name == "out" else name] = dtype
    function = f"{operator.function}_tanh" if "approximate" in request.flags else operator.function
    packed = operator.gated and "up" not in arrays
    return ActivationSpec(
        kernel,
        function,
        operator.gated,
        packed,
        tuple(arrays.items()),
        config or _default(kernel, function, operator.gated, request),
        request.unaligned,
    )


def _default(kernel: str, function: str, gated: bool, request: Request) -> TileConfig:
    """Return what was the fastest on an H200: more loads of a thread are in flight where it has more to compute."""
    if kernel == "row_scaled":
        return TileConfig(
            next((t for t, most in zip(_THREADS, BUCKETS, strict=False) if request.columns <= most), 1024), 2
        )
    wide = request.dtypes["x"] is FLOAT32
    if gated or (function in ("silu", "relu_squared") and (wide or kernel == "forward")):
        return TileConfig(128, 2)
    return TileConfig(128, 1 if kernel == "backward" and not wide else 4)
