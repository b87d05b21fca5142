# SPDX-License-Identifier: Apache-2.0
"""Operators that torch's autograd records: their gradients are those that declarations name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from .. import _native, select
from ..arguments import Array, Input, Output, OutputDType, Result, Stream, Update
from ..arrays import dtype_id
from ..declaration import NOBODY, Declaration, declaration_of
from ..errors import ArgumentError
from ..spec import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["recorded", "recorded_natively"]

# Of outputs that have a gradient.
_FLOATS = (FLOAT32.id, FLOAT16.id, BFLOAT16.id)
# The type of what is left out, and those of numbers, flags and words that are nothing else.
_NUMBERS = frozenset((float, int, bool, str, type(None)))
_ABSENT = frozenset((type(None),))


def recorded(
    declaration: Declaration, call_forward: Callable[..., Any], call_backward: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return an operator's call whose gradient autograd records, where torch traces or transforms the call.

    Parameters
    ----------
    declaration : Declaration
        The operator's.
    call_forward : callable
        Its call below autograd: of all arguments, in the order of the declaration. So is what is returned.
    call_backward : callable or None
        The same of the operator that computes its gradient, which refuses to be differentiated itself; None: there is
        none.
    """
    forward = _Forward(declaration, call_forward)
    run_backward = _Backward(declaration, call_backward).run if call_backward else _passed

    def run_forward(ctx: Any, values: tuple[Any, ...], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        return forward.run(ctx, values)

    _, apply = _function(declaration.name, run_forward, run_backward)

    def call(*values: Any) -> Any:
        values = forward.prepare(values)
        return apply(values, *forward.inputs(values))

    return call


def recorded_natively(
    declaration: Declaration, forward_operator: _native.Operator, backward_operator: _native.Operator
) -> Callable[..., Any]:
    """Return an operator's call whose gradient autograd records, of tensors that are nothing but their memory.

    Parameters
    ----------
    declaration : Declaration
        The operator's.
    forward_operator, backward_operator : Operator
        The native operator, and the one that computes its gradient.
    """
    forward = _Forward(declaration, forward_operator.entry(direct=True))
    backward = _Backward(declaration, backward_operator.entry())

    def slow_backward(ctx: Any, *gradients: Any) -> Any:
        enabled = torch.is_grad_enabled()
        with torch.no_grad():
            first, *others = backward.run(ctx, *gradients)
        # The native call hands autograd those inputs alone that are given.
        *_, is_given = ctx.kept
        found = (first, *(one for one, given in zip(others, is_given, strict=True) if given))
        return _once(declaration.name, found, (*ctx.saved_tensors, *gradients)) if enabled else found

    native = _native.Gradient(
        forward_operator,
        backward_operator,
        prepare=forward.prepare,
        forward_steps=forward.steps,
        backward_steps=backward.steps,
        slow_backward=slow_backward,
        is_grad_enabled=torch.is_grad_enabled,
        implementation=select.chosen,
        **forward.places,
        given=backward.numbers,
    )
    function, apply = _function(declaration.name, native.forward, slow_backward)
    # What autograd calls is a function in Python that looks for `backward`: it takes as long as all of ours.
    function._backward_cls.apply = native.backward
    native.begin(apply)
    return native.call


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Return a Function of autograd's, and its call."""
    # The class has the operator's name when it is made: torch names the nodes of its graph so.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(torch.autograd.Function)(name, (torch.autograd.Function,), methods)
    # Past a wrapper in Python, which looks for transforms of functions: it takes as long as the rest.
    return function, super(torch.autograd.Function, function).apply


def _passed(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """Return the gradients of inputs that have that of the output, summed over what each was broadcast along."""
    needs, dtypes = ctx.needs_input_grad[1:], iter(ctx.kept[0])
    return None, *(
        gradient.sum_to_size(shape).to(next(dtypes)) if need and gradient is not None else None
        for need, shape in zip(needs, ctx.shapes, strict=True)
    )


def _once(name: str, gradients: tuple[Any, ...], of: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return gradients that are refused to be differentiated: those of a backward with ``create_graph=True``.

    The refusal leads on to what they were computed of: torch takes a gradient that does not lead to a leaf for zero.
    """
    leaves = (None if one is None else one.detach().requires_grad_() for one in gradients)
    given = (*leaves, *(one for one in of if one is not None))
    found: tuple[Any, ...] = torch._C._functions.DelayedError(f"{name} has no second derivative", len(given))(*given)
    return found[: len(gradients)]


class _Place(NamedTuple):
    """An argument, and where it is among those of the call."""

    argument: Any
    at: int


def _places(declaration: Declaration, *kinds: type) -> list[_Place]:
    return [_Place(one, at) for at, one in enumerate(declaration.arguments) if isinstance(one, kinds)]


class _Saved(NamedTuple):
    """An array that the backward takes."""

    name: str  # of the forward's array
    input_at: int  # among the call's arguments, if it is an input
    only_for: int  # the number of the input that needs a gradient if it is needed


def _saved(declaration: Declaration) -> list[_Saved]:
    gradient = declaration.gradient
    assert gradient is not None
    inputs = _places(declaration, Input)
    at = {place.argument.name: place.at for place in inputs}
    number = {place.argument.name: number for number, place in enumerate(inputs)}
    return [
        _Saved(of, at.get(of, NOBODY), number.get(gradient.only_for.get(name, ""), NOBODY))
        for name, of in gradient.takes.items()
    ]


class _Steps(NamedTuple):
    """What a call does whose inputs and results are wanted in one way."""

    ask: list[int]  # results that are asked for, beside those that the caller wants
    show: list[int]  # which of what is made the caller gets
    statistics: list[int]  # which of that has no gradient
    save: list[tuple[bool, int]]  # what is saved: of what is made, or of the call's arguments
    inputs: list[int]  # the arguments whose gradients are needed


def _several(at: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what gives a tuple of the values at so many places."""
    if len(at) > 1:
        return itemgetter(*at)
    return (lambda values: (values[at[0]],)) if at else lambda values: ()


class _Forward:
    """The call of an operator within autograd's forward, and what its backward needs of it."""

    def __init__(self, declaration: Declaration, call: Callable[..., Any]) -> None:
        gradient = declaration.gradient
        assert gradient is not None
        self._name, self._call = declaration.name, call
        self._inputs = _places(declaration, Input)
        at = [place.at for place in self._inputs]
        self.inputs = _several(at)
        self._written = _places(declaration, Output, Update)
        self._dtypes = _places(declaration, OutputDType)
        others = (Array, OutputDType, Stream)
        self._numbers = [place for place in _places(declaration, object) if not isinstance(place.argument, others)]
        self._kept = [place.at for place in self._numbers if place.argument.name in gradient.numbers]
        self._of_numbers = _several([place.at for place in self._numbers])
        self._streams = _places(declaration, Stream)
        number = {place.argument.name: number for number, place in enumerate(self._inputs)}
        self._gives = [[number[name] for name in names] for names in gradient.gives.values()]
        self._summed = list(gradient.of)[1:]
        self._passes = not gradient.operator
        # In the order in which a call returns them: outputs are always there, results where they are asked for.
        self._returned = _places(declaration, Output, Result)
        self._results = [place.at for place in self._returned if isinstance(place.argument, Result)]
        self._saved = _saved(declaration)
        self._steps: dict[tuple[Any, ...], _Steps] = {}
        two = [place for place in self._inputs if declaration.has_two_shapes(place.argument)]
        taken = gradient.takes.values()
        self._pattern = [place for place in two if place.argument.name in taken]
        self._others = [place for place in two if place.argument.name not in taken]
        unusual = (*self._written, *self._dtypes, *self._streams)
        self._unusual = _several([place.at for place in unusual])
        # For the native call, which does what `prepare` and `run` do.
        self.places = {
            "inputs": at,
            "unusual": [place.at for place in unusual],
            "needed": [place.at for place in self._pattern] if self._others else [],
            "numbers": [place.at for place in self._numbers],
            "kept": self._kept,
            "results": self._results,
        }

    def prepare(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse what has no gradient, and return the arguments with numbers as they are now."""
        self.check(values)
        return self.plain(values)

    def check(self, values: tuple[Any, ...]) -> None:
        """Refuse what has no gradient."""
        # Of most calls, nothing of this is given.
        usual = {*map(type, self._unusual(values))} <= _ABSENT
        if usual and (not self._others or any(values[place.at] is not None for place in self._pattern)):
            return

        def requires_grad(place: _Place) -> bool:
            return getattr(values[place.at], "requires_grad", False)

        def refuse(what: str) -> None:
            who = (place.argument.keyword for place in (*self._inputs, *self._written) if requires_grad(place))
            raise ArgumentError(f"{self._name}: {what.format(who=next(who))}")

        for argument, at in self._written:
            if values[at] is not None:
                refuse(f"{argument.keyword} is written in place, which records no gradient, and {{who}} requires grad")
        for _, at in self._dtypes:
            if values[at] is not None and dtype_id(values[at]) not in _FLOATS:
                refuse(f"an output of {values[at]} has no gradient, and {{who}} requires grad: pass {{who}}.detach()")
        for argument, at in self._streams:
            if values[at] is not None:
                refuse(f"{argument.keyword} records no gradient, and {{who}} requires grad: use torch.cuda.stream()")
        # The gradient has the shape of what the backward is given of these.
        if all(values[place.at] is None for place in self._pattern):
            for place in self._others:
                if requires_grad(place) and values[place.at].ndim > 1:
                    names = " or ".join(other.argument.keyword for other in self._pattern)
                    refuse(f"{place.argument.keyword} of each head has a gradient only beside {names}: give ones")

    def plain(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with numbers as they are now: a tensor that is one may be another at the backward."""
        if {*map(type, self._of_numbers(values))} <= _NUMBERS:
            return values
        changed = list(values)
        for _, at in self._numbers:
            if type(values[at]) not in _NUMBERS:
                with contextlib.suppress(Exception):  # what is no number is refused by the call
                    changed[at] = values[at].item()
        return tuple(changed)

    def run(self, ctx: Any, values: tuple[Any, ...]) -> Any:
        needs = ctx.needs_input_grad[1:]
        key = (needs, *(values[at] for at in self._results))
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = self.steps(needs, values)
        given = list(values)
        for at in steps.ask:
            given[at] = True
        found = self._call(*given)
        if not isinstance(found, tuple):
            found = (found,)
        if steps.statistics:
            ctx.mark_non_differentiable(*(found[number] for number in steps.statistics))
        ctx.save_for_backward(*[found[at] if is_made else values[at] for is_made, at in steps.save])
        dtypes = tuple([values[at].dtype for at in steps.inputs])
        ctx.kept = dtypes, [values[at] for at in self._kept], select.chosen.get(), needs
        if self._passes:
            ctx.shapes = [values[place.at].shape for place in self._inputs]
        return found[0] if len(steps.show) == 1 else tuple(found[number] for number in steps.show)

    def steps(self, needs: tuple[bool, ...], values: tuple[Any, ...]) -> _Steps:
        """Return what to do in calls whose inputs and results are wanted so."""
        saved = [one for one in self._saved if one.only_for == NOBODY or needs[one.only_for]]
        if not any(needs[number] for whose in self._gives for number in whose):
            saved = []  # what is left is the gradient of an output, as it is
        asked = {one.name for one in saved if one.input_at == NOBODY}
        made: list[str] = []  # in the order in which the call returns them
        ask, show, statistics = [], [], []
        for array, at in self._returned:
            is_result = isinstance(array, Result)
            if is_result and not values[at]:
                if array.name not in asked:
                    continue
                ask.append(at)
            else:
                show.append(len(made))
                # An output that is no more than a sum has the gradient of what was added, if that needs one.
                is_sum = array.name in self._summed and not any(needs[number] for number in self._gives[0])
                statistics += [len(made)] if is_result or is_sum else []
            made.append(array.name)
        save = [(True, made.index(one.name)) if one.input_at == NOBODY else (False, one.input_at) for one in saved]
        return _Steps(ask, show, statistics, save, [at for number, (_, at) in enumerate(self._inputs) if needs[number]])


class _Gives(NamedTuple):
    """Something that the backward returns."""

    asks: int  # the argument that says whether it is wanted, or `NOBODY`: it is always there
    dtype: int  # the argument that says its data type, or `NOBODY`
    inputs: list[int]  # the numbers of the forward's inputs that it is the gradient of


class _BackwardSteps(NamedTuple):
    """What a backward does for inputs and gradients of one kind."""

    passes: list[tuple[int, int, Any]]  # inputs whose gradient is that of an output: of which, and as which type
    values: list[Any] | None  # the arguments of the backward's call, but for what follows; None: there is none
    saved: list[int]  # which of these each saved tensor is
    gradients: list[tuple[int, int]]  # which of these is the gradient of which output
    gives: list[tuple[int, int, Any]]  # inputs, what that is returned is the gradient of each, and its type


class _Backward:
    """The call of the operator that computes the gradients, within autograd's backward."""

    def __init__(self, declaration: Declaration, call: Callable[..., Any]) -> None:
        gradient = declaration.gradient
        assert gradient is not None
        backward = declaration_of(gradient.operator)
        self._call = call
        inputs = _places(declaration, Input)
        self._defaults = [None if one.default is ... else one.default for one in backward.arguments]
        own = {place.argument.name: place.at for place in _places(backward, object)}
        of = {place.argument.name: number for number, place in enumerate(inputs)}
        self._inputs = len(inputs)
        returned = [place.argument.name for place in _places(declaration, Output, Result)]
        self._saved = list(zip((own[name] for name in gradient.takes), _saved(declaration), strict=True))
        self.numbers = [own[one.name] for one in declaration.arguments if one.name in gradient.numbers]
        (self._first, self._first_at), *self._others = (
            (returned.index(output), own[array]) for output, array in gradient.of.items()
        )
        self._gives = []
        for made in backward.made:
            if not isinstance(made.array, Update):
                whose = [of[name] for name in gradient.gives[made.array.name]]
                self._gives.append(_Gives(made.asks, made.dtype, whose))
        self._passes = [(of[name], returned.index(output)) for name, output in gradient.passes.items()]
        self._steps: dict[tuple[Any, ...], _BackwardSteps] = {}

    def run(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        dtypes, numbers, implementation, needs, *_ = ctx.kept
        key = needs, dtypes, tuple([one is not None for one in gradients])
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = self.steps(*key)
        result: list[Any] = [None] * (1 + self._inputs)  # the first of all arguments together
        for at, output, dtype in steps.passes:
            result[1 + at] = gradients[output].to(dtype)
        if steps.values is None:
            return tuple(result)
        values = list(steps.values)
        for at, tensor in zip(steps.saved, ctx.saved_tensors, strict=True):
            values[at] = tensor
        for at, number in zip(self.numbers, numbers, strict=True):
            values[at] = number
        for at, output in steps.gradients:
            values[at] = gradients[output].contiguous()
        token = select.chosen.set(implementation)
        try:
            found = self._call(*values)
        finally:
            select.chosen.reset(token)
        if not isinstance(found, tuple):
            found = (found,)
        for at, number, dtype in steps.gives:
            gradient = found[number]
            result[1 + at] = gradient if gradient.dtype is dtype else gradient.to(dtype)
        return tuple(result)

    def steps(self, needs: tuple[bool, ...], dtypes: tuple[Any, ...], given: tuple[bool, ...]) -> _BackwardSteps:
        """Return what to do in a backward of such inputs, for which such gradients are given."""
        of = dict(zip([at for at, need in enumerate(needs) if need], dtypes, strict=True))
        passes = [(at, output, of[at]) for at, output in self._passes if at in of and given[output]]
        if not given[self._first]:
            # What is added to an output that is not used has the gradient of the others.
            used = [output for output, _ in self._others if given[output]]
            passes += [(at, output, of[at]) for output in used for at in self._gives[0].inputs if at in of]
            return _BackwardSteps(passes, None, [], [], [])
        wanted = [one for one in self._gives if one.asks == NOBODY or any(at in of for at in one.inputs)]
        if not any(at in of for one in wanted for at in one.inputs):
            return _BackwardSteps(passes, None, [], [], [])
        values = list(self._defaults)
        for one in self._gives:
            if one.asks != NOBODY:
                values[one.asks] = one in wanted
        kinds: dict[int, set[Any]] = {}
        for one in wanted:
            if one.dtype != NOBODY:
                kinds.setdefault(one.dtype, set()).update(of[at] for at in one.inputs if at in of)
        for at, several in kinds.items():
            # Gradients of several types are rounded once each, from float32.
            values[at] = several.pop() if len(several) == 1 else torch.float32 if several else None
        return _BackwardSteps(
            passes,
            values,
            [at for at, saved in self._saved if saved.only_for == NOBODY or needs[saved.only_for]],
            [(at, output) for output, at in ((self._first, self._first_at), *self._others) if given[output]],
            [(at, number, of[at]) for number, one in enumerate(wanted) for at in one.inputs if at in of],
        )
