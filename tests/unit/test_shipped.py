# SPDX-License-Identifier: Apache-2.0
"""The configurations that are shipped: of how many cases, within a device's limits, and where another one is taken."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest

from transformer_rtc import manifest
from transformer_rtc.declaration import declaration_of
from transformer_rtc.ops import shipped
from transformer_rtc.ops.norm import family as norm
from transformer_rtc.ops.norm.config import ForwardRow, NormConfig
from transformer_rtc.ops.norm.heuristics import backward_rule, configure, configure_wide_backward, forward_rule
from transformer_rtc.ops.softmax.config import SoftmaxConfig
from transformer_rtc.ops.softmax.family import row_of
from transformer_rtc.ops.softmax.heuristics import rule
from transformer_rtc.request import Request
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT32, STATIC_ARCHITECTURES, DeviceLimits

MOST_ROWS = 60
LEAST_GAIN, LEAST_RUNS = 0.03, 2
ROWS = [(architecture, key) for architecture in STATIC_ARCHITECTURES for key in shipped.rows_of(architecture)]


def chosen_by_rule(request: Request, limits: DeviceLimits) -> tuple[Any, Any]:
    """Return what a request's configuration depends on, and the one that the rule alone finds."""
    if request.operator not in norm.OPERATORS:
        row = row_of(request)
        return row, rule(row, limits)
    if norm.OPERATORS[request.operator].backward:
        row = norm.backward_row(request)
        return row, backward_rule(row, limits) or configure_wide_backward(row)
    row = norm.forward_row(request)
    return row, forward_rule(row, limits)


def test_few_cases_have_one_and_each_gained_in_two_runs():
    assert ROWS
    of_family = collections.Counter((architecture, json.loads(key)[0] == "softmax") for architecture, key in ROWS)
    assert max(of_family.values()) <= MOST_ROWS
    for architecture, key in ROWS:
        row = shipped.rows_of(architecture)[key]
        assert row.keys() == {"request", "config", "gains"}
        assert len(row["gains"]) >= LEAST_RUNS and min(row["gains"].values()) >= LEAST_GAIN


@pytest.mark.parametrize(("architecture", "key"), ROWS)
def test_a_case_has_what_is_shipped_for_it_instead_of_what_the_rule_finds(architecture, key):
    found, limits = shipped.rows_of(architecture)[key], ARCHITECTURES[architecture]
    request = manifest.parse(json.dumps(found["request"])).request
    row, by_rule = chosen_by_rule(request, limits)
    config = (NormConfig if request.operator in norm.OPERATORS else SoftmaxConfig)(**found["config"])
    assert shipped.case_key(row.case) == key
    assert config != by_rule and row.fits(config, limits)
    family = declaration_of(request.operator).family
    default, *others = family.configurations(request, limits)
    assert default == config and by_rule in others
    # Where it does not fit, the rule's.
    for small in (limits._replace(max_ctas_per_row=1), limits._replace(max_cluster_size=1)):
        expected = config if config.ctas_per_row == 1 else chosen_by_rule(request, small)[1]
        assert family.configurations(request, small)[0] == expected


def test_another_architecture_or_size_has_the_rules():
    row = ForwardRow("layer_norm", 262144, (FLOAT32,), (FLOAT32, FLOAT32), FLOAT32, FLOAT32)
    limits = ARCHITECTURES[90]
    assert configure(row, limits) != forward_rule(row, limits)
    assert configure(row, ARCHITECTURES[100]) == forward_rule(row, ARCHITECTURES[100])
    small = limits._replace(shared_memory_per_cta=99 * 1024)
    assert configure(row, small) == forward_rule(row, small)
    for other in (row._replace(hidden=262140), row._replace(rows=(BFLOAT16,), normalized=BFLOAT16)):
        assert configure(other, limits) == forward_rule(other, limits)
