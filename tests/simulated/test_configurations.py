# SPDX-License-Identifier: Apache-2.0
"""Configurations that no rule chooses: what a tuner may choose gives right numbers, too."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import softmax_checks
from cases import draw
from norm_checks import case_of
from rigs import ALIGNED, MISALIGNED, configured, few, hold, simulated

from transformer_rtc import warming
from transformer_rtc.declaration import declaration_of
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.ops.softmax.config import SoftmaxConfig
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32

DRAWS = [pytest.param(n, marks=[pytest.mark.thorough(share=0.15)] if n > 3 else []) for n in range(160)]


@pytest.mark.parametrize("number", DRAWS)
def test_a_norm_by_any_configuration_is_right(number, rng):
    drawn = random.Random(int(rng.integers(2**32)))
    architecture = drawn.choice((80, 90))
    while True:
        hidden = drawn.choice((drawn.randrange(1, 4000), 8 * drawn.randrange(1, 700), 256 * drawn.randrange(1, 40)))
        case = draw(hidden, drawn.random() < 0.5, drawn)
        family = declaration_of(case.operator).family
        _, *others = family.configurations(case.request, ARCHITECTURES[architecture])
        if others:
            break
    config = drawn.choice(others)
    # Unaligned rows take more shared memory.
    (_, rule), *_ = family.specialise(case.request._replace(unaligned=True), ARCHITECTURES[architecture], config)
    least = few(architecture, rule)
    print(case.name, config.symbol, architecture)
    (rig,) = simulated(architecture, multiprocessors=least + case.margin + drawn.randrange(3))
    with configured(case.operator, config):
        # Backward adds rows up in an order that alignment is part of.
        for layouts in ((ALIGNED,), (MISALIGNED,)) if "backward" in case.operator else ((ALIGNED, MISALIGNED),):
            hold([rig], case, rng, layouts)


@pytest.mark.parametrize("number", DRAWS[::2])
def test_softmax_by_any_configuration_is_right(number, rng):
    drawn = random.Random(int(rng.integers(2**32)))
    architecture, dtype = drawn.choice((80, 90)), drawn.choice((BFLOAT16, FLOAT32))
    columns = drawn.choice((drawn.randrange(1, 100), drawn.randrange(1, 5000), 64 * drawn.randrange(1, 150)))
    rows, options, asked = drawn.randrange(1, 40), {}, {}
    if drawn.random() < 0.3 and columns < 600:
        rows, options, asked = columns, {"causal": "aligned"}, {"causal": "aligned"}
    elif drawn.random() < 0.5:
        options = {"mask": rng.random((1, 1, rows, columns)) < 0.3}
        asked = {"mask": "bool"}
    if drawn.random() < 0.3:
        options["sink"] = np.array([0.5], np.float32)
    with contextlib.ExitStack() as stack:
        names = []
        for name in ("softmax", "softmax_backward"):
            given = {key: value for key, value in asked.items() if name == "softmax" or key == "causal"}
            sums = {"sink": "float32", "lse": True} if "sink" in options and name == "softmax_backward" else {}
            (request,) = warming._requests(name, dtype.name, columns, False, False, given | sums)
            configs = declaration_of(name).family.configurations(request, ARCHITECTURES[architecture])
            config = drawn.choice(configs)
            stack.enter_context(configured(name, config))
            names.append(config.symbol)
        print(columns, dtype.name, [*options], names, architecture)
        on = softmax_checks.simulated(architecture, multiprocessors=64)
        softmax_checks.hold_drawn(on, rng, (1, 1, rows, columns), dtype, 0.7, names=("softmax",), **options)


# Rows of 1000 or 1304 columns that end within the vectors of the last step, or of the last chunk.
_RING = NormConfig(64, 1, 8, 2, in_shared=True, stages=3, bulk=True)
_CHUNKS = NormConfig(32, 1, 8, 2)
ENDS = [
    *((operator, 1000, _RING) for operator in ("rms_norm", "layer_norm", "add_rms_norm", "layer_norm_add")),
    *((f"{norm}_backward", 1000, _RING) for norm in ("rms_norm", "layer_norm")),
    *((operator, 1304, _CHUNKS) for operator in ("layer_norm", "rms_norm_add", "layer_norm_add")),
]


@pytest.mark.parametrize(("operator", "hidden", "config"), ENDS)
def test_vectors_behind_a_row_are_neither_read_nor_counted(operator, hidden, config, rng):
    case = case_of(operator, 5, hidden, FLOAT16)
    (rig,) = simulated(90, multiprocessors=1)
    with configured(operator, config):
        # No element lies between rows, and none behind the last one.
        hold([rig], case, rng, [(0, 0, 0, 8)])


@pytest.mark.parametrize(("dtype", "steps"), [(np.float16, 1), (np.float32, 2)])
def test_the_largest_scores_are_counted_wherever_they_are(dtype, steps, rng):
    # Many are equal, in each vector and behind the last whole one.
    on = softmax_checks.simulated(multiprocessors=2)
    x = rng.standard_normal((8, 253)).astype(dtype)
    x[:, ::5] = 3
    # 256 columns: those of a row that begins within a vector wrap round to the first thread.
    with softmax_checks.configured(SoftmaxConfig(32, 1, 8, steps)):
        found = on("softmax", x)
    exact = np.exp(x.astype(np.float64) - 3)
    tolerance = {"rtol": 1e-3, "atol": 1e-7} if dtype == np.float16 else {"rtol": 1e-6}
    np.testing.assert_allclose(found, exact / exact.sum(axis=1, keepdims=True), **tolerance)


def test_a_ctas_columns_may_be_far_below_those_of_others(rng):
    on = softmax_checks.simulated(multiprocessors=2)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    x[:, 256:] -= 75
    with softmax_checks.configured(SoftmaxConfig(32, 1, 4, 2, 2, clusters=True)):
        found = on("softmax", x)
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(found, exact / exact.sum(axis=1, keepdims=True), rtol=1e-5)
