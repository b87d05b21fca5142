"""reference.py's formulas and bounds on tensors of the GPU, in double: for more rows than numpy has time for."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import reference
from cases import Case

from transformer_rtc.spec import DType

_CHUNK = 1 << 24  # elements that are worked on together


class _Tensors:
    """numpy's functions that those formulas use; numpy's own where there is no tensor."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        def call(value: Any, *others: Any, **options: Any) -> Any:
            module = self._torch if isinstance(value, self._torch.Tensor) else np
            return getattr(module, name)(value, *others, **options)

        return call if name in ("abs", "sqrt", "isinf", "frexp", "clip", "where", "mean") else getattr(np, name)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self._torch.zeros(shape, dtype=self._torch.float64, device=self._device)

    def ldexp(self, one: float, exponent: Any) -> Any:
        if isinstance(exponent, self._torch.Tensor):
            return one * self._torch.pow(2.0, exponent.double())
        return np.ldexp(one, exponent)


@functools.lru_cache
def formulas() -> ModuleType:
    """Return a second reference.py, which takes tensors."""
    import torch  # not where tests are only collected

    spec = importlib.util.spec_from_file_location("reference_of_tensors", reference.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    wide, module.np = module._wide, _Tensors(torch)
    module._wide = lambda array, otherwise=0.0: wide(None, otherwise) if array is None else array.double()
    return module


def added(x: Any, residual: Any) -> Any:
    return (x.float() + residual.float()).to(residual.dtype)


def statistics(x: Any, eps: float, centred: bool) -> tuple[Any, Any]:
    """Return mean and rstd of float32."""
    found = formulas().forward(centred, x, eps=eps)
    return found["mean"].value.float(), found["rstd"].value.float()


def assert_within(actual: Any, expected: Any, dtype: DType, what: str) -> None:
    """Hold a tensor against an `Expected`, as reference.assert_within does."""
    tensors = formulas()
    assert tuple(actual.shape) == tuple(expected.value.shape), what
    near, want = (tensors._clipped(values, dtype) for values in (actual.double(), expected.value))
    unit = tensors.unit(want, dtype)
    over = (near - want).abs() / unit / (0.5 + expected.bound / unit)
    over = over.nan_to_num(nan=float("inf"))  # there is no NaN where all inputs are numbers
    worst = int(over.argmax())
    assert over.flatten()[worst] <= 1, (
        f"{what}, element {worst} of {tuple(actual.shape)}, is {actual.flatten()[worst].item()!r} instead of "
        f"{expected.value.flatten()[worst].item()!r}: {over.flatten()[worst].item():.3f} times what it may be off; "
        f"{int((over > 1).sum())} elements are beyond theirs"
    )


def hold(case: Case, given: dict[str, Any], results: dict[str, Any], eps: float, chain: int) -> None:
    """Hold a case of many rows against its formulas; `chain` is the longest chain of additions in a sum over rows."""
    tensors = formulas()
    tensors.additions = lambda rows, groups=1: chain
    types, rows = case.types, given["x"].shape[0]
    step = max(1, _CHUNK // case.hidden)
    sums: dict[str, Any] = {}
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        ours = {name: array[part] if array.shape[0] == rows else array for name, array in given.items()}
        x, weight, residual = ours["x"], given.get("weight"), ours.get("residual")
        if case.backward:
            expected = tensors.backward(
                case.centred, ours["dy"], x, weight, eps, case.weight_offset, ours.get("mean"), ours.get("rstd"),
                ours.get("dresidual"),
            )  # fmt: skip
            for name in ("dweight", "dbias"):
                found = expected.pop(name)
                value, bound = sums.get(name, (0.0, 0.0))
                sums[name] = value + found.value, bound + found.bound
        else:
            if case.adds == "before":
                x, residual = added(x, residual), None
                # A sum of numbers is no NaN; zeros of both signs are equal.
                assert (x == results["residual_out"][part]).all(), f"residual_out of rows from {start} on"
            expected = tensors.forward(
                case.centred, x, weight, given.get("bias"), eps, case.weight_offset, residual, case.out
            )  # fmt: skip
        for name, want in expected.items():
            if name in results:
                assert_within(results[name][part], want, types[name], f"{name} of rows from {start} on")
    for name, (value, bound) in sums.items():
        if name in results:
            assert_within(results[name], tensors.Expected(value, bound), types[name], name)
