# SPDX-License-Identifier: Apache-2.0
"""Native operators without kernels: views of memory that is not there, and plans that record what they would launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from transformer_rtc import _native
from transformer_rtc.arguments import (
    Argument,
    Array,
    Input,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
    Stream,
    Update,
)
from transformer_rtc.declaration import Declaration, declaration_of
from transformer_rtc.operator import native_operator
from transformer_rtc.spec import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, INT8

BASE = 1 << 32  # an address, far from others
ONE = (1, 1, 1)
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
OUTPUTS = (*FLOATS, FLOAT8_E4M3, FLOAT8_E5M2, INT8)
COLUMNS, ROWS, ONE_ELEMENT = "columns | heads columns", "... heads columns", "() | 1"
EVERY_KIND = (
    Input("x", ROWS, FLOATS), Input("residual", ROWS, FLOATS, optional=True),
    Input("weight", COLUMNS, FLOATS, optional=True), Input("bias", COLUMNS, FLOATS, optional=True),
    Input("scale", ONE_ELEMENT, (FLOAT32,), optional=True), Input("mean", "...", (FLOAT32,), optional=True),
    Real("eps", 1.0),
    Output("out", ROWS, OUTPUTS), OutputWanted("return_out", ("out",)),
    Output("residual_out", ROWS, FLOATS, like="residual"), OutputWanted("return_residual", ("residual_out",)),
    OutputDType("out_dtype", OUTPUTS, ("out",)), Update("amax", ONE_ELEMENT, (FLOAT32,)),
    Result("rstd", "...", (FLOAT32,)), Result("dweight", COLUMNS, FLOATS, like="weight"),
    Result("dbias", COLUMNS, FLOATS, like="bias"), OutputDType("grad_dtype", FLOATS, ("dweight", "dbias")),
    Margin("sm_margin"), Stream("stream"),
)  # fmt: skip


def declared(arguments: Sequence[Argument], name: str = "op", family: Any = None) -> Declaration:
    return Declaration(name, family, tuple(arguments), positional=())


def arrays_of(arguments: Sequence[Argument]) -> list[str]:
    return [argument.name for argument in arguments if isinstance(argument, Array)]


PLACES = {name: BASE << number for number, name in enumerate(arrays_of(EVERY_KIND))}  # far from each other


def default_of(argument: Argument) -> object:
    """Return what an argument is where a call says nothing of it."""
    return False if isinstance(argument, Result) else None if argument.default is ... else argument.default


def view(shape=(6, 4, 16), dtype=FLOAT32, at=BASE, strides=None, device=0, read_only=False) -> _native.View:
    """Return a view of memory that is not there: no check may read it."""
    dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return _native.View(
        at, shape, dense if strides is None else strides, getattr(dtype, "id", dtype), device, read_only
    )


def required_views(operator: str, shape: tuple[int, ...]) -> dict[str, _native.View]:
    """Return views for the arrays that a call of an operator needs, with rows of `shape`: of float32, far apart."""
    declaration = declaration_of(operator)
    # With what splits others, all arrays of rows have one width.
    needed = [
        one
        for one in declaration.arrays
        if isinstance(one, Input) and (not one.optional or one.name == declaration.split_by)
    ]
    return {one.name: view(shape_of(one, shape), at=BASE << place) for place, one in enumerate(needed)}


def shape_of(array: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array where rows have this one: theirs, or that of a row."""
    return shape if array.shape.startswith("...") else shape[-1:]


def values_of(arguments: Sequence[Argument], given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what `run_views` takes: the views with what a call gets for them, and the value of every argument."""
    views = [(given[name], given[name]) if isinstance(given.get(name), _native.View) else None
             for name in arrays_of(arguments)]  # fmt: skip
    return views, [given.get(argument.name, default_of(argument)) for argument in arguments]


class Made(NamedTuple):
    shape: tuple[int, ...]
    dtype: int
    pointer: int


class Launch(NamedTuple):
    stage: int
    grid: tuple[int, int, int]
    params: bytes
    memory: dict[str, tuple[Any, ...]]


class Recorder:
    """A native operator whose plans record what they would launch."""

    def __init__(self, arguments=EVERY_KIND, fields=((),), columns_per_cta=8, row_groups=0, **rule) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.vec_sizes: list[int] = []  # of the requests: the elements of vectors that rows are whole ones of
        self.zeroed: list[tuple[int, int]] = []
        self.launches: list[Launch] = []
        self.made: list[Made] = []
        self.fields, self.columns_per_cta, self.row_groups = fields, columns_per_cta, row_groups
        self.cooperative = rule.pop("cooperative", False)
        self.rule = {
            "rows_per_cta": 1, "ctas_per_row": 1, "max_groups": _native.Plan.ANY_GROUPS, "workspace_bytes": 0,
            "partial_bytes": 0, "multiprocessors": 132, **rule,
        }  # fmt: skip
        self.arguments = arguments
        self.native = native_operator(
            declared(arguments), self.plan, lambda *request: self.rule["multiprocessors"], pytest.fail
        )

    def plan(self, implementation: int, device: int, vec_size: int, *request: Any) -> _native.Plan:
        self.requests.append((implementation, device, *request))
        self.vec_sizes.append(vec_size)
        stages = []
        for number, fields in enumerate(self.fields):

            def launch(grid, block, cluster, shared, cooperative, params, stream, memory, stage=number):
                assert (block, cluster, stream) == ((32, 1, 1), ONE, 0)
                self.launches.append(Launch(stage, grid, params, {row[3]: row for row in memory}))

            launcher = _native.PythonLauncher(lambda *request: self.zeroed.append(request), launch, 512)
            filled = [(source, 8 * place, *index, 0)[:4] for place, (source, *index) in enumerate(fields)]
            of_rows = {"rows_of": 3, "row_groups": self.row_groups} if self.row_groups else {"per": 1}
            later = {"columns_per_cta": self.columns_per_cta, **of_rows} if number else {}
            cooperative = self.cooperative and number == 0
            stages.append(_native.Stage(launcher, (32, 1, 1), ONE, 0, cooperative, filled, **later))
        return _native.Plan(stages, **self.rule)

    def allocate(self, shape, dtype, device):
        made = Made(shape, dtype, (BASE << 16) + (len(self.made) << 24))
        self.made.append(made)
        return made, made.pointer

    def __call__(self, **given: Any) -> Any:
        views, values = values_of(self.arguments, {"x": view(), "return_residual": False, **given})
        return self.native.run_views(views, values, self.allocate, 0)

    def grid(self, *shape: int, **given: Any) -> tuple[int, int, int]:
        """Return the grid of the first launch over rows of a shape."""
        self.launches.clear()
        self(x=view(shape), **given)
        return self.launches[0].grid

    @property
    def dtypes(self) -> dict[str, int]:
        """What the last plan was asked for with, without what is absent."""
        names = arrays_of(self.arguments)
        return {name: dtype for name, dtype in zip(names, self.requests[-1][2], strict=True) if dtype}


class ChecksPassed(Exception):
    """A call got as far as its plan."""


@pytest.fixture
def check() -> Callable[..., tuple[object, ...]]:
    """Return a call of an operator on views that stops where a plan is needed.

    It returns the plan's arguments, but for how its rows lie.
    """

    def plan(implementation: int, device: int, _vec_size: int, *arguments: object) -> _native.Plan:
        raise ChecksPassed((implementation, device, *arguments))

    made: dict[str, _native.Operator] = {}

    def run(x=None, weight=None, out=None, allocate=pytest.fail, operator="rms_norm", **given):  # type: ignore[no-untyped-def]
        declaration = declaration_of(operator)
        if operator not in made:
            made[operator] = native_operator(declaration, plan, lambda *request: 132, pytest.fail)
        views, values = values_of(declaration.arguments, given | {"x": x, "weight": weight, "out": out})
        try:
            return (made[operator].run_views(views, values, allocate, 0),)
        except ChecksPassed as passed:
            return passed.args[0]

    return run
