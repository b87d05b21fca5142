# SPDX-License-Identifier: Apache-2.0
"""Launches TransformerEngine's norm kernels as TransformerEngine does.

How a grid, shared memory and a workspace are sized is in its transformer_engine/common/normalization/rtc_dispatch.cpp;
what a kernel is given, in common.cpp beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformer_engine_text import (
    FAMILIES,
    FINALIZE_THREADS,
    FINALIZE_WARPS,
    WARP,
    BaseParams,
    Choice,
    checked,
    choose,
    compile_kernels,
)

FLOAT = 4  # bytes; a pair of them is what CTAs exchange, but for the forward general kernels, which exchange one
ALIGNMENT = 16


class Launch(NamedTuple):
    function: Any
    grid: int
    block: tuple[int, int]
    shared: int = 0
    cooperative: bool = False

    def __call__(self, params: BaseParams, stream: int) -> None:
        from cuda.bindings import driver

        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        shape = (self.grid, 1, 1, *self.block, 1, self.shared, stream, ctypes.addressof(pointers))
        if self.cooperative:
            checked(driver.cuLaunchCooperativeKernel(self.function, *shape))
        else:
            checked(driver.cuLaunchKernel(self.function, *shape, 0))


class Sizes(NamedTuple):
    """Bytes: of dynamic shared memory, and for each group of CTAs that shares rows, of the workspace's parts."""

    shared: int
    exchanged: int
    barriers: int
    partial: int


def sizes(operator: str, choice: Choice, columns: int, ctas_per_row: int) -> Sizes:
    backward, (tuned, _, _, warps_m, warps_n, *_) = FAMILIES[operator].backward, choice
    shared = 0
    if tuned:
        shared = 0 if warps_n == 1 else warps_m * warps_n * 2 * FLOAT * 2
        if backward and ctas_per_row == 1:
            shared += warps_m * columns * FLOAT
    element = 2 * FLOAT if tuned or backward else FLOAT
    shares = ctas_per_row > 1
    exchanged = warps_m * ctas_per_row * element * 2 if shares else 0
    return Sizes(shared, exchanged, 2 * 4 if shares else 0, columns * FLOAT if backward else 0)


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


class Plan:
    """The launches for one shape on the current device, as TransformerEngine makes them once for each shape.

    Parameters
    ----------
    torch : module
        Its arrays are what a call is given.
    folder : Path
        The checkout.
    operator, dtype : str
        A key of FAMILIES, and the type of every array of rows and columns.
    rows, columns : int
        Of x, which has no gaps.
    """

    def __init__(self, torch: Any, folder: Path, operator: str, dtype: str, rows: int, columns: int) -> None:
        from cuda.bindings import driver

        torch.cuda.synchronize()  # makes the context that the driver's calls need
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        choice = choose(folder, operator, dtype, columns)
        compiled = compile_kernels(folder, operator, dtype, choice, properties.major * 10 + properties.minor)
        self._torch, self._family = torch, FAMILIES[operator]
        self._module = checked(driver.cuModuleLoadData(compiled.cubin))
        main, *others = (checked(driver.cuModuleGetFunction(self._module, symbol)) for symbol in compiled.symbols)
        threads = choice.warps_m * choice.warps_n * WARP
        ctas_per_row = choice.ctas_per_row if choice.tuned else ceil_div(columns, choice.hidden)
        self._sizes = sizes(operator, choice, columns, ctas_per_row)
        shared = self._sizes.shared
        if shared >= 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(main, attribute, shared))
        resident = checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(main, threads, shared))
        groups = properties.multi_processor_count * resident // ctas_per_row
        if not choice.tuned:
            groups = min(ceil_div(rows, choice.warps_m), groups)
        self._shape = {"ctas_per_col": groups, "ctas_per_row": ctas_per_row, "rows": rows, "cols": columns}
        self._launches = [Launch(main, groups * ctas_per_row, (threads, 1), shared, ctas_per_row > 1)]
        for function in others:
            if choice.tuned:
                finalize = Launch(function, columns * FLOAT // choice.finalize_bytes // WARP, (FINALIZE_THREADS, 1))
            else:
                grid = ceil_div(columns, WARP * choice.finalize_bytes // FLOAT)
                finalize = Launch(function, grid, (WARP, FINALIZE_WARPS))
            self._launches.append(finalize)

    def _launch(self, x: Any, **values: Any) -> None:
        """Launch with parameters from arrays and numbers, and a workspace that this call allocates and clears."""
        torch, groups = self._torch, self._shape["ctas_per_col"]
        bytes_of = [ceil_div(size * groups, ALIGNMENT) * ALIGNMENT for size in self._sizes[1:]]
        parts = [*bytes_of, bytes_of[-1] if "dbeta" in values else 0]
        workspace = torch.empty(sum(parts), dtype=torch.uint8, device=x.device)
        exchanged, barriers, *partial = workspace.split(parts)
        if len(barriers):
            barriers.zero_()
        values |= {"x": x, "workspace": exchanged, "barrier": barriers}
        if self._family.backward:
            values |= zip(("dgamma_part", "dbeta_part"), partial, strict=True)
        params = self._family.params(**self._shape)
        for name, value in values.items():
            setattr(params, name, value.data_ptr() if hasattr(value, "data_ptr") else value)
        stream = torch.cuda.current_stream().cuda_stream
        for launch in self._launches:
            launch(params, stream)

    def forward(self, x: Any, weight: Any, bias: Any, eps: float) -> Callable[[], Any]:
        """Return a call that gives y; the row's statistics, which the kernels always write, are allocated too."""
        torch, statistics = self._torch, ("rs",) if bias is None else ("rs", "mu")

        def call() -> Any:
            y = torch.empty_like(x)
            values = {name: torch.empty(len(x), dtype=torch.float32, device=x.device) for name in statistics}
            if bias is not None:
                values["beta"] = bias
            self._launch(x, z=y, gamma=weight, epsilon=eps, **values)
            return y

        return call

    def backward(self, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Callable[[], Any]:
        """Return a call that gives dx, the weight's gradient and, where there is a mean, the bias's."""
        torch = self._torch

        def call() -> Any:
            results = {"dx": torch.empty_like(x), "dgamma": torch.empty_like(weight)}
            if mean is not None:
                results["dbeta"] = torch.empty_like(weight)
            self._launch(x, dz=dy, gamma=weight, rs=rstd, **({} if mean is None else {"mu": mean}), **results)
            return tuple(results.values())

        return call
