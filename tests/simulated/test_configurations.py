"""Configurations that no rule chooses: what a tuner may choose gives right numbers, too."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import softmax_checks
from cases import draw
from rigs import ALIGNED, MISALIGNED, configured, few, hold, simulated

from transformer_rtc import warming
from transformer_rtc.declaration import declaration_of
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT32

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
