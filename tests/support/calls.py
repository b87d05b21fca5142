# SPDX-License-Identifier: Apache-2.0
"""A case's inputs, its call, and what it must give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import reference
from cases import BY_ROW, DELAYED, FLOATS, Case
from reference import Expected

import transformer_rtc
from transformer_rtc.spec import FLOAT32, DType

EPS = 1e-5
STATISTICS = ("mean", "rstd")
BEFORE = 0.25  # what amax holds before a call


def shape_of(case: Case, name: str) -> tuple[int, ...]:
    """Return the shape of an array of a case's call."""
    if name in ("weight", "bias"):
        return case.columns
    if name in ("dweight", "dbias"):
        return case.columns if case.weight else case.shape[-1:]
    if name in (*STATISTICS, *BY_ROW):
        return case.shape[:-1]
    return (1,) if name in DELAYED else case.shape


def input_types(case: Case) -> dict[str, DType]:
    results = result_names(case)
    return {
        name: dtype
        for name, dtype in case.types.items()
        if dtype and name not in results and name not in ("amax", "scale_inv")
    }


def result_names(case: Case) -> tuple[str, ...]:
    """Return what a call returns, in its order."""
    if case.backward:
        names = ("out", "dweight", "dbias")
    else:
        names = ("out", *(("residual_out",) if case.adds == "before" else ()), *STATISTICS, *BY_ROW)
    return tuple(name for name in names if case.types.get(name))


def result_types(case: Case) -> dict[str, DType]:
    """Return what a call returns or writes."""
    types = case.types
    return {
        name: dtype
        for name, dtype in types.items()
        if dtype and (name in result_names(case) or name in ("amax", "scale_inv"))
    }


def make_inputs(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    """Return a case's inputs, of different magnitudes in each row; mean and rstd are those of the forward call."""
    made: dict[str, np.ndarray] = {}
    for name, dtype in input_types(case).items():
        if name in ("weight", "bias"):
            made[name] = reference.random_weight(rng, case.columns, dtype)
        elif name == "scale":
            made[name] = np.float32(2.0 ** rng.uniform(-2, 6, 1))
        elif name == "x":
            made[name] = reference.random_rows(rng, case.shape, dtype)
            if case.centred:  # means of both signs, above and below the deviations
                offset = made[name].astype(np.float32).std(axis=-1, keepdims=True) * rng.uniform(-8, 8)
                made[name] = (made[name].astype(np.float32) + offset).astype(made[name].dtype)
        elif name not in STATISTICS:
            made[name] = reference.random_rows(rng, case.shape, dtype)
    if case.backward and case.rstd:
        statistics = reference.forward(case.centred, made["x"], eps=EPS)
        made |= {name: statistics[name].value.astype(np.float32) for name in STATISTICS if name in input_types(case)}
    return made


def expect(case: Case, given: Mapping[str, np.ndarray], groups: int = 1) -> dict[str, Expected]:
    """Return what a call must give, by name; a sum before a norm is exact.

    `groups` is how many groups of CTAs share the rows in a backward call.
    """
    x, weight, residual = given["x"], given.get("weight"), given.get("residual")
    if case.backward:
        return reference.backward(
            case.centred, given["dy"], x, weight, EPS, case.weight_offset, given.get("mean"), given.get("rstd"),
            given.get("dresidual"), groups,
        )  # fmt: skip
    found: dict[str, Expected] = {}
    if case.adds == "before":
        assert residual is not None
        x, residual = reference.added(x, residual, case.sum), None
        found["residual_out"] = Expected(x.astype(np.float64), np.zeros(x.shape))
    assert case.out is not None
    found |= reference.forward(
        case.centred, x, weight, given.get("bias"), EPS, case.weight_offset, residual, case.out, case.rounds
    )  # fmt: skip
    y = found["out"]
    found["amax"] = reference.largest_magnitude(y, BEFORE)
    if "scale" in given:
        found["out"] = reference.scaled(y, given["scale"])
        found["scale_inv"] = Expected(1.0 / given["scale"].astype(np.float64), np.zeros(1))
    if case.scaling == BY_ROW:
        found["out"], found["row_scale"] = reference.row_scaled(y, case.out)
    return found


def call(
    case: Case, given: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Call a case's operator with arrays of any framework; return what it returns and writes, by name.

    `outputs` has ``"out"`` and ``"residual_out"`` where the caller gives them, and ``"amax"`` and ``"scale_inv"``.
    """
    outputs = dict(outputs or {})
    keywords = {"eps": EPS, "weight_offset": case.weight_offset, "sm_margin": case.margin, **given, **outputs}
    keywords |= options
    operator = getattr(transformer_rtc, case.operator)
    if case.backward:
        first = (keywords.pop("dy"), keywords.pop("x"))
        keywords |= {
            "return_dx": case.out is not None, "return_dweight": case.dweight is not None,
            "return_dbias": case.dbias is not None,
        }  # fmt: skip
        sums = case.dweight or case.dbias
        if sums:
            keywords.setdefault("dweight_dtype", sums.name)
    else:
        first = (keywords.pop("x"), *((keywords.pop("residual"),) if case.adds else ()))
        keywords |= {f"return_{name}": True for name in STATISTICS if case.types.get(name)}
        if case.scaling == BY_ROW:
            keywords["row_scaling"] = True
        if case.sum is not None and "residual_out" not in outputs:
            keywords["residual_dtype"] = case.sum.name
        if case.rounds:
            keywords["round_before_weight"] = True
    if case.out is not None and "out" not in outputs:
        keywords.setdefault("out_dtype", case.out.name)
    returned = operator(*first, **keywords)
    names = result_names(case)
    results = dict(zip(names, returned, strict=True)) if len(names) > 1 else {names[0]: returned}
    return results | {name: outputs[name] for name in ("amax", "scale_inv") if name in outputs}


def hold_within(
    case: Case, results: Mapping[str, np.ndarray], expected: Mapping[str, Expected], what: str = ""
) -> None:
    """Hold each result against what it must be."""
    for name, dtype in result_types(case).items():
        reference.assert_within(results[name], expected[name], dtype, f"{name}{what}")
        once = not case.bias and not (name == "out" and case.rounds)
        if case.operator == "rms_norm" and name in ("out", "rstd") and dtype in FLOATS and once:
            reference.assert_close(results[name], expected[name].value, dtype, f"{name}{what}")
    if "residual_out" in results:
        exact = expected["residual_out"].value.astype(results["residual_out"].dtype)
        np.testing.assert_array_equal(results["residual_out"], exact, f"residual_out{what}")


def made_values(case: Case) -> dict[str, np.ndarray]:
    """Return those outputs of one value that a call is given."""
    return {
        name: np.full(1, BEFORE if name == "amax" else np.nan, np.float32)
        for name, dtype in case.types.items()
        if dtype is FLOAT32 and name in ("amax", "scale_inv")
    }
