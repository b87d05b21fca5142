# SPDX-License-Identifier: Apache-2.0
"""An operator at run time: its native call, and the plan behind each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from . import _native, arrays, select, usage
from .arguments import (
    Argument,
    Array,
    Choice,
    Flag,
    Input,
    Integer,
    Margin,
    Output,
    OutputDType,
    OutputWanted,
    Real,
    Result,
    Shape,
    Stream,
    Update,
)
from .declaration import Declaration, declaration_of, declare
from .device import Device
from .errors import LaunchError, UnexpectedCompileError
from .kernel_manager import KernelManager, manager
from .launch import Kernel, LaunchConfig
from .request import Asked, LaunchRule, Request
from .spec import DTYPES, Params
from .tuning import values_of

__all__ = ["Operator", "Planner", "forget_plans", "native_operator", "operator_of", "register"]

_KINDS = {
    Input: _native.Kind.INPUT,
    Output: _native.Kind.OUTPUT,
    Update: _native.Kind.UPDATE,
    Result: _native.Kind.RESULT,
    OutputDType: _native.Kind.OUTPUT_DTYPE,
    OutputWanted: _native.Kind.OUTPUT_WANTED,
    Real: _native.Kind.REAL,
    Integer: _native.Kind.INTEGER,
    Flag: _native.Kind.FLAG,
    Choice: _native.Kind.CHOICE,
    Margin: _native.Kind.SM_MARGIN,
    Stream: _native.Kind.STREAM,
}


# ---- A declaration as the native operator takes it -------------------------------------------------------------------


def _symbol(declaration: Declaration, name: str) -> int:
    return -1 if not name else declaration.symbols.index(name)


def _words(declaration: Declaration, shape: Shape, other: Shape | None) -> str:
    """Return what a message says of a shape, or of the second one that an array may have."""
    first = declaration.arrays[0]
    if shape.leading and not shape.sizes:
        return f"one element for each row of {first.keyword}"
    if len(shape.sizes) == 1 and shape.sizes[0].multiple == 1:
        (size,) = shape.sizes
        named = "" if size.symbol == declaration.symbols[0] else f" [{', '.join(first.shape.split())}]"
        return f"one element for each {declaration.noun(size.symbol)} of {first.keyword}{named}"
    if other is not None and shape.sizes[1:] == other.sizes:
        return f"such a row for each {declaration.noun(shape.sizes[0].symbol)}"
    return ""


def _native_shapes(declaration: Declaration, array: Array) -> list[_native.Shape]:
    shapes = declaration.shapes(array)
    return [
        _native.Shape(
            shape.leading,
            [(size.multiple, _symbol(declaration, size.symbol)) for size in shape.sizes],
            _words(declaration, shape, shapes[0] if number else None),
        )
        for number, shape in enumerate(shapes)
    ]


def native_argument(declaration: Declaration, argument: Argument) -> _native.Argument:
    """Return an argument as the native operator takes it: arrays, arguments and symbols by their numbers."""
    names = [array.name for array in declaration.arrays]
    made = _native.Argument(_KINDS[type(argument)], argument.name, argument.keyword)
    for attribute in ("like", "shape_of", "wanted_with"):
        if name := getattr(argument, attribute, ""):
            setattr(made, attribute, names.index(name))
    for attribute in ("optional", "broadcast", "rereads"):
        setattr(made, attribute, getattr(argument, attribute, False))
    if isinstance(argument, (Array, OutputDType)):
        made.dtypes = [dtype.id for dtype in argument.dtypes]
    if isinstance(argument, Array):
        made.shapes = _native_shapes(declaration, argument)
        made.broadcast |= bool(getattr(argument, "shape_of", ""))
    elif isinstance(argument, (OutputDType, OutputWanted)):
        made.of = [names.index(name) for name in argument.of]
    elif isinstance(argument, Real):
        if argument.minimum is not None:
            made.minimum = argument.minimum
    elif isinstance(argument, Integer):
        made.optional, made.minimum, made.largest = True, argument.minimum, argument.largest
        made.noun, made.needs_words = argument.noun, argument.needs_words
        if argument.needs:
            made.needs = declaration.arguments.index(declaration.argument(argument.needs))
    elif isinstance(argument, Choice):
        made.words = [
            _native.Word(word)
            if equal is None
            else _native.Word(
                word, (_symbol(declaration, equal.first), _symbol(declaration, equal.second)), equal.reason
            )
            for word, equal in argument.words.items()
        ]
    return made


def native_operator(
    declaration: Declaration,
    plan: Callable[..., _native.Plan],
    check: Callable[..., int],
    slow_call: Callable[[tuple[Any, ...], bool], object],
    gradient: Callable[..., object] | None = None,
    dispatch: Callable[..., object] | None = None,
) -> _native.Operator:
    """Return the native operator of a declaration."""
    names = [array.name for array in declaration.arrays]
    return _native.Operator(
        declaration.name,
        [native_argument(declaration, argument) for argument in declaration.arguments],
        [_native.Symbol(name, declaration.noun(name), name in declaration.conditional) for name in declaration.symbols],
        plan,
        check,
        slow_call,
        gradient,
        dispatch,
        arrays.framework_of,
        select.chosen,
        declaration.buckets,
        names.index(declaration.split_by) if declaration.split_by else -1,
        [names.index(name) for name in declaration.broadcasts],
        declaration.elementwise,
    )


# ---- An operator -----------------------------------------------------------------------------------------------------


class Planner:
    """What makes the plans behind an operator's calls.

    Parameters
    ----------
    declaration : Declaration
        What the operator is like.
    kernels : KernelManager, optional
        Where its kernels come from; by default `manager`.
    config : dataclass, optional
        The configuration of every call, as a tuner asks for. None: what a tuning file says, or the default one.
    """

    def __init__(self, declaration: Declaration, kernels: KernelManager | None = None, config: Any = None) -> None:
        self.declaration = declaration
        self._kernels, self._config = kernels, config
        self._arrays = [array.name for array in declaration.arrays]
        self._reals = [argument.name for argument in declaration.arguments if isinstance(argument, Real)]
        self._integers = [argument.name for argument in declaration.arguments if isinstance(argument, Integer)]

    def native_operator(self) -> _native.Operator:
        """Return a native operator for calls with views alone: it holds this planner, and nothing holds it."""

        def no_call(*_: object) -> object:
            raise NotImplementedError("it takes views")

        return native_operator(self.declaration, self._plan, self._check, no_call)

    def _request(self, dtype_ids: tuple[int, ...], columns: int, per_head: bool, margin: bool, flags: int) -> Request:
        """Return what the native call asks a plan for."""
        dtypes = {name: DTYPES.get(dtype) for name, dtype in zip(self._arrays, dtype_ids, strict=True)}
        flagged = frozenset(name for number, name in enumerate(self.declaration.flags) if flags >> number & 1)
        return Request(self.declaration.operator, dtypes, columns, per_head, margin, flagged)

    def _where(self, implementation: int, ordinal: int) -> Device:
        """Return the device that a call of an implementation runs on."""
        return select.device_for(implementation, ordinal, f"{self.declaration.name}: {self.declaration.arrays[0].name}")

    def _check(self, implementation: int, ordinal: int, _vec_size: int, *asked: Any) -> int:
        """Refuse what a plan would be refused for, without a kernel; return how many multiprocessors there are."""
        device = self._where(implementation, ordinal)
        self.declaration.family.check(self._request(*asked))
        return device.multiprocessors

    def _plan(self, implementation: int, ordinal: int, vec_size: int, *asked: Any) -> _native.Plan:
        device, whole, family = self._where(implementation, ordinal), self._request(*asked), self.declaration.family
        if select.is_static(implementation, device):
            entries = family.static(whole)
            usage.observe(Asked(whole))
            program = family.static_program
            return self._native_plan(
                [
                    (manager.get_static(family.name, entry.symbol, entry.params, device, program), entry.params, rule)
                    for entry, rule in entries
                ]
            )
        limits = device.limits
        while True:
            config = device.tuning.config(whole, limits) if self._config is None else self._config
            stages, request = family.specialise(whole, limits, config), whole
            needed = stages[0][1].vec_size
            if vec_size % needed:
                request = whole._replace(unaligned=True)
                stages = family.specialise(request, limits, config)
            wanted = Asked(request, limits.max_ctas_per_row, None if config is None else values_of(config))
            if self._config is None:  # else nobody asks for it but a tuner
                usage.observe(wanted)
            try:
                loaded = (self._kernels or manager).get_all([spec for spec, _ in stages], device)
            except UnexpectedCompileError as error:
                from .manifest import line

                raise error.asked_by(line(wanted)) from None
            try:
                return self._native_plan(
                    [(kernel, spec.params, rule) for kernel, (spec, rule) in zip(loaded, stages, strict=True)], needed
                )
            except LaunchError:
                if self._config is not None:
                    raise
                if config is not None:
                    device.tuning.drop(whole)
                    continue
                # A small GPU, or a part of one, may not hold so many CTAs together.
                fewer = max(rule.ctas_per_row for _, rule in stages) // 2
                if fewer == 0 or fewer >= limits.max_ctas_per_row:
                    raise
                limits = limits._replace(max_ctas_per_row=fewer)

    def _native_plan(self, kernels: Sequence[tuple[Kernel, Params, LaunchRule]], vec_size: int = 1) -> _native.Plan:
        # Operators that share a general kernel fill its parameters from arrays of their own: not kernel.params.
        stages, resident = [], []
        for kernel, params, rule in kernels:
            config = _launch_config(kernel, rule)
            resident.append(kernel.prepare(config))
            # Those without a source, of arrays that this operator does not have, are zero.
            fields = [self._fill(field.source, params.offsets[field.name]) for field in params.fields if field.source]
            stages.append(
                _native.Stage(
                    kernel.launcher,
                    config.block,
                    config.cluster,
                    config.dynamic_shared_memory,
                    config.cooperative,
                    fields,
                    early=rule.early,
                    columns_per_cta=rule.columns_per_cta,
                    per=_symbol(self.declaration, rule.per),
                    rows_of=self._arrays.index(rule.rows_of) if rule.rows_of else -1,
                    row_groups=rule.row_groups,
                )
            )
        kernel, _, rule = kernels[0]
        if rule.cooperative and resident[0] < rule.ctas_per_row:
            raise LaunchError(
                f"{kernel.symbol}: {rule.ctas_per_row} CTAs must be resident together; {kernel.where} can hold "
                f"{resident[0]}"
            )
        persistent = rule.cooperative or rule.persistent
        return _native.Plan(
            stages,
            multiprocessors=kernel.multiprocessors,
            rows_per_cta=rule.rows_per_cta,
            elements_per_cta=rule.elements_per_cta,
            ctas_per_row=rule.ctas_per_row,
            max_groups=resident[0] // rule.ctas_per_row if persistent else _native.Plan.ANY_GROUPS,
            workspace_bytes=rule.workspace_bytes,
            partial_bytes=rule.partial_bytes,
            row_bytes=rule.row_bytes,
            turn_bytes=rule.turn_bytes,
            vec_size=vec_size,
            whole=_symbol(self.declaration, rule.whole),
        )

    def _fill(self, source: str, offset: int) -> tuple[_native.Source, int, int, int]:
        """Return what fills a field, and with which array, value or symbol.

        ``"x.data"`` is the pointer of the array x, ``"x.heads_stride"`` a broadcast array's stride along a dimension,
        ``"eps"`` a number of the call, ``"heads"`` a dimension's size, ``"heads_magic"`` what divides by it,
        ``"columns - heads"`` a difference of two sizes, ``"columns"`` the last dimension, ``"rows"`` their number,
        and ``"3"`` that number.
        """
        if source.isdigit():
            return _native.Source.CONSTANT, offset, int(source), 0
        owner, _, what = source.rpartition(".")
        if owner:
            return self._fill_of_array(self._arrays.index(owner), what, offset)
        for kind, names in (
            (_native.Source.REAL, self._reals),
            (_native.Source.INTEGER, self._integers),
            (_native.Source.FLAG, list(self.declaration.flags)),
        ):
            if what in names:
                return kind, offset, names.index(what), 0
        if " - " in what:
            first, second = what.split(" - ")
            return _native.Source.DIFFERENCE, offset, self._symbol(first), self._symbol(second)
        name, _, part = what.rpartition("_")
        if part in ("magic", "shift") and name != "inner":
            return getattr(_native.Source, part.upper()), offset, self._symbol(name), 0
        if what == "columns" or what in self.declaration.symbols:
            return _native.Source.SIZE, offset, self._symbol(what), 0
        return getattr(_native.Source, what.upper()), offset, 0, 0

    def _fill_of_array(self, array: int, what: str, offset: int) -> tuple[_native.Source, int, int, int]:
        name, _, part = what.rpartition("_")
        if what == "rows":
            return _native.Source.ARRAY_ROWS, offset, array, 0
        if part == "stride" and name in self.declaration.symbols:
            return _native.Source.STRIDE, offset, array, self._symbol(name)
        return getattr(_native.Source, what.upper()), offset, array, 0

    def _symbol(self, name: str) -> int:
        return 0 if name == "columns" else _symbol(self.declaration, name)


class Operator(Planner):
    """An operator's native call, and the plans behind it. The parameters are those of `Planner`."""

    def __init__(self, declaration: Declaration, kernels: KernelManager | None = None, config: Any = None) -> None:
        super().__init__(declaration, kernels, config)
        gradient = self.record if declaration.gradient else None
        self.native = native_operator(declaration, self._plan, self._check, self._call, gradient, self._dispatch)
        self.call: Callable[..., Any] = self.native.entry()
        # For torch, which has seen to gradients and transforms already.
        self.direct: Callable[..., Any] = self.native.entry(direct=True)

    def _call(self, values: tuple[Any, ...], direct: bool) -> object:
        seen_to = (None, None) if direct else (self.record, self._dispatch)
        return arrays.call(self.native, self.declaration, values, select.simulating_on_host, *seen_to)

    def record(self, *values: Any) -> object:
        """Call it, and have torch's autograd record the gradient; of tensors, some of which require it."""
        from .torch.autograd import recorded, recorded_natively

        assert self.declaration.gradient is not None
        if backward := self.declaration.gradient.operator:
            record = recorded_natively(self.declaration, self.native, operator_of(backward).native)
        else:
            record = recorded(self.declaration, self.direct, None)
        self.record = record  # type: ignore[method-assign]
        return record(*values)

    def _dispatch(self, *values: Any) -> object:
        """Call it as an operator of torch's, which traces or transforms the call."""
        from .torch.operators import dispatched

        return dispatched(self.declaration.name)(*values)


def _launch_config(kernel: Kernel, rule: LaunchRule) -> LaunchConfig:
    """Return how a kernel is launched, but for the grid: that has the CTAs of one row, or of one cluster."""
    ctas = (1, rule.ctas_per_row, 1) if rule.row_groups else (rule.ctas_per_row, 1, 1)
    shared = rule.dynamic_shared_memory
    if rule.spread_ctas:
        shared = 2 * shared // (math.ceil(rule.spread_ctas / kernel.multiprocessors) + 1)
    return LaunchConfig(
        grid=ctas,
        block=(rule.threads, 1, 1),
        cluster=ctas if rule.clusters else (1, 1, 1),
        dynamic_shared_memory=shared,
        cooperative=rule.cooperative,
    )


_operators: dict[str, Operator] = {}


def forget_plans() -> None:
    """Have the next call of each kind ask for its kernels again, and tell observers (usage.py). They stay loaded."""
    for operator in tuple(_operators.values()):
        operator.native.forget_plans()


def operator_of(name: str) -> Operator:
    """Return the operator of a public function, which the first call makes."""
    found, declaration = _operators.get(name), declaration_of(name)
    if found is not None and found.declaration is declaration:
        return found
    if found is not None:  # of a declaration that is no more
        del _operators[name]
    return _operators.setdefault(name, Operator(declaration))


def register(declaration: Declaration) -> Callable[..., Any]:
    """Add an operator to those that there are, and return its native call.

    It takes all arguments in the order of the declaration. The first call makes the operator: a process uses few of
    those that there are.
    """
    declare(declaration)
    return _native.deferred_entry(lambda: operator_of(declaration.name).native)
