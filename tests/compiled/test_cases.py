# SPDX-License-Identifier: Apache-2.0
"""The table of cases tries everything with everything that divides a row otherwise."""

from __future__ import annotations

import itertools
from collections import defaultdict

from cases import BACKWARD, CASES, FORWARD, Case, features, layout_of

from transformer_rtc.spec import ARCHITECTURES, DeviceLimits

# Not for every option, nor at every size.
SOMETIMES = ("in turn", "registers cluster", "registers grid")


def way_of(case: Case, limits: DeviceLimits) -> str:
    """Return how a case's rows are held: two together by the kernel that has one at a time."""
    return layout_of(case, limits).replace("together", "shared")


def test_every_operator_type_and_option_is_tried_with_every_way_to_hold_a_row():
    seen = defaultdict(set)
    for case in CASES:
        seen[case.backward, way_of(case, ARCHITECTURES[90])] |= features(case)
    layouts = ("warps", "padded", "shared cluster", "padded cluster")
    assert seen.keys() >= {*itertools.product((False, True), layouts), (True, "shared"), (True, "wide")}
    for (backward, layout), found in seen.items():
        of_all = set.union(*(found for (of, _), found in seen.items() if of == backward))
        # Forward, one CTA mostly holds a row in registers.
        if not layout.startswith(SOMETIMES) and (backward or layout != "shared"):
            assert found == of_all, f"{layout}: {of_all - found}"


def test_every_operator_is_tried_with_every_way_to_hold_a_row_without_clusters():
    seen = defaultdict(set)
    for case in CASES:
        seen[case.backward, way_of(case, ARCHITECTURES[80])].add(case.operator)
    assert seen.keys() >= set(itertools.product((False, True), ("shared grid", "padded grid")))
    for (backward, layout), found in seen.items():
        if not layout.startswith(SOMETIMES):
            assert found == set(BACKWARD if backward else FORWARD), layout
