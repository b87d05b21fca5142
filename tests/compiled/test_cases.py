"""The table of cases tries everything with everything that divides a row otherwise."""

from __future__ import annotations

import itertools
from collections import defaultdict

from cases import BACKWARD, BY_ROW, CASES, FORWARD, features, layout_of

from transformer_rtc.spec import ARCHITECTURES

# Not for every option, nor at every size.
SOMETIMES = ("in turn", "together")


def test_every_operator_type_and_option_is_tried_with_every_way_to_hold_a_row():
    seen = defaultdict(set)
    for case in CASES:
        seen[case.backward, layout_of(case, ARCHITECTURES[90])] |= features(case)
    layouts = ("warps", "padded", "shared cluster", "padded cluster")
    assert seen.keys() >= {*itertools.product((False, True), layouts), (True, "shared"), (True, "wide")}
    for (backward, layout), found in seen.items():
        of_all = set.union(*(found for (of, _), found in seen.items() if of == backward))
        # Only rows with a scale are in registers of several CTAs.
        if not layout.startswith((*SOMETIMES, "registers cluster")):
            assert found == of_all, f"{layout}: {of_all - found}"
    assert {one[1] for one in seen[False, "registers cluster"] if one[0] == "scaling"} == {BY_ROW}


def test_every_operator_is_tried_with_every_way_to_hold_a_row_without_clusters():
    seen = defaultdict(set)
    for case in CASES:
        seen[case.backward, layout_of(case, ARCHITECTURES[80])].add(case.operator)
    assert seen.keys() >= set(itertools.product((False, True), ("shared grid", "padded grid")))
    for (backward, layout), found in seen.items():
        if not layout.startswith(SOMETIMES):
            assert found == set(BACKWARD if backward else FORWARD), layout
