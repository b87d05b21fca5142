# SPDX-License-Identifier: Apache-2.0
"""The family of norms on a GPU: the checks that the simulator runs too, on torch's tensors."""

from __future__ import annotations

import functools
import random

import calls
import norm_checks
import norm_values
import numpy as np
import pytest
import reference
from cases import CASES, FLOATS, NORMS, Case
from frameworks import FRAMEWORKS
from norm_checks import calls_of, covering
from rigs import ALIGNED, Rig, assert_same_bits, hold, run

from transformer_rtc.spec import BFLOAT16

NUMBERS = {case.name: number for number, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def seed(request) -> int:
    given = request.config.getoption("--seed")
    return random.SystemRandom().randrange(2**32) if given is None else given


@functools.lru_cache(maxsize=1)
def known(name: str, seed: int) -> tuple[dict[str, np.ndarray], dict[str, reference.Expected]]:
    """Return a case's inputs and what they must give: once for all implementations, which come one after the other."""
    case = CASES[NUMBERS[name]]
    given = calls.make_inputs(np.random.default_rng([seed, NUMBERS[name]]), case)
    return given, calls.expect(case, given)


@pytest.mark.parametrize("implementation", ["rtc", "static"], indirect=True)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_case_is_within_the_bound_of_float64(name, rig, seed):
    print(f"random data of --seed {seed}")
    case = CASES[NUMBERS[name]]
    given, expected = known(name, seed)
    found = run(rig, case, given)
    calls.hold_within(case, found, expected)
    # Outputs of the framework's allocator, in memory that held NaN a moment ago.
    poison = [rig.guarded(calls.shape_of(case, output), dtype) for output, dtype in calls.result_types(case).items()]
    del poison
    made = rig.call(case, rig.on_device(given), rig.on_device(calls.made_values(case)))
    for output, dtype in calls.result_types(case).items():
        assert made[output].dtype == rig.arrays.dtype(dtype) and rig.arrays.is_dense(made[output])
    assert_same_bits(rig.on_host(made), found, "in new memory")


@pytest.mark.parametrize(
    ("hidden", "x", "weight", "out"), covering([7, 1000, 4096, 20_001], FLOATS, (*FLOATS, None), FLOATS)
)
def test_every_combination_of_types(hidden, x, weight, out, rig, rng):
    hold([rig], Case(5, hidden, x, weight, out, True), rng, (ALIGNED,))


_EVERY_HIDDEN = sorted({case.hidden for case in CASES})
CHECKS = [
    *(found for check, _, _, *axes in norm_values.CHECKS for found in calls_of(check, *axes)),
    *calls_of(
        norm_checks.a_rows_bits_are_the_same_alone_and_among_very_many, (1, 64, 129, 4096, 4097, 65536), ["rms_norm"],
        FLOATS,
    ),
    *calls_of(norm_checks.a_rows_bits_are_the_same_alone_and_among_many, _EVERY_HIDDEN, ["rms_norm"], [BFLOAT16]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "arguments"), CHECKS)
def test_norms(check, arguments, rig, rng):
    check(rig, *arguments, rng)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("operator", "leading"), covering(NORMS, [(0,), (0, 3), (3, 0, 2)]))
def test_no_rows_give_empty_outputs_and_sums_of_zero(operator, leading, framework, implementation, rng):
    rig = Rig(implementation, FRAMEWORKS[framework]())
    norm_checks.no_rows_give_empty_outputs_and_sums_of_zero(rig, operator, leading, rng)
