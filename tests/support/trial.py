# SPDX-License-Identifier: Apache-2.0
"""An operator on trial: of the two halves of each row it returns the product, an output half as wide as its input.

It is declared and its kernel is text; no C++ knows it. It stands for what an activation with a gate needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import make_api

from transformer_rtc import declaration
from transformer_rtc.arguments import Input, Output, OutputDType, Result, Stream
from transformer_rtc.declaration import Declaration
from transformer_rtc.request import LaunchRule, Request, StaticKernel
from transformer_rtc.spec import FLOAT32, DeviceLimits, Field, KernelSpec, TextSpec

_ROW_FIELDS = tuple(
    Field(f"{name}_{what}", type_, f"{name}.{what if what != 'pointer' else 'data'}")
    for name in ("x", "out")
    for what, type_ in (("pointer", "pointer"), ("outer_stride", "int64"), ("inner_stride", "int64"))
)
FIELDS = (
    *_ROW_FIELDS,
    Field("widest", "pointer", "widest.data"),
    Field("inner_count", "uint32", "inner_count"),
    Field("columns", "int32", "columns"),
    Field("spare", "int32", "columns - heads"),
)
TEXT = """
extern "C" __global__ void multiply_halves(Params params) {
  const long long outer = blockIdx.x / params.inner_count, inner = blockIdx.x % params.inner_count;
  const auto* x = static_cast<const float*>(params.x_pointer) + outer * params.x_outer_stride +
                  inner * params.x_inner_stride;
  auto* out = static_cast<float*>(params.out_pointer) + outer * params.out_outer_stride +
              inner * params.out_inner_stride;
  for (int column = threadIdx.x; column < params.columns; column += blockDim.x) {
    out[column] = x[column] * x[params.columns + column];
  }
  // A result of another width, which says how many more columns than heads there are.
  if (params.widest != nullptr) {
    for (int column = threadIdx.x; column < 3 * params.columns; column += blockDim.x) {
      static_cast<float*>(params.widest)[blockIdx.x * 3LL * params.columns + column] = params.spare;
    }
  }
}
"""


class TrialFamily:
    name = "trial"

    def check(self, request: Request) -> None:
        pass

    def case(self, request: Request) -> tuple[object, ...]:
        return ()

    def configurations(self, request: Request, limits: DeviceLimits) -> tuple[object, ...]:
        return ()  # there is nothing to choose

    def specialise(
        self, request: Request, limits: DeviceLimits, config: object = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        return ((TextSpec(TEXT, "multiply_halves", FIELDS), LaunchRule(threads=64)),)

    def static(self, request: Request) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        raise NotImplementedError

    def static_program(self) -> str:
        raise NotImplementedError


DECLARATION = Declaration(
    "multiply_halves",
    TrialFamily(),
    (
        Input("x", "... heads 2*columns", (FLOAT32,), doc="The rows."),
        Output("out", "... columns", (FLOAT32,), doc="Where y is written.", returned="y", returned_doc="The products."),
        OutputDType("out_dtype", (FLOAT32,), ("out",), doc="Of y where `out` is not given."),
        Result("widest", "... 3*columns", (FLOAT32,), doc="Whether to return a wider array, too."),
        Stream("stream", doc="The stream."),
    ),
    positional=("x",),
    summary="Return the product of the two halves of each row.",
)


@contextmanager
def on_trial() -> Iterator[Callable[..., Any]]:
    """Have the operator among those that there are; yield the user's function."""
    try:
        yield make_api.function_of(DECLARATION)
    finally:
        del declaration._declarations[DECLARATION.name]
