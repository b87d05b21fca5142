# SPDX-License-Identifier: Apache-2.0
"""Reads what configurations.py has written: the times of a request's configurations, in each run."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformer_rtc.declaration import declaration_of
from transformer_rtc.manifest import parse
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.ops.norm.family import OPERATORS as NORMS
from transformer_rtc.ops.norm.family import backward_row, forward_row
from transformer_rtc.ops.norm.heuristics import backward_rule, forward_rule
from transformer_rtc.ops.softmax.config import SoftmaxConfig
from transformer_rtc.ops.softmax.family import row_of
from transformer_rtc.ops.softmax.heuristics import rule
from transformer_rtc.request import Asked, Request
from transformer_rtc.spec import DeviceLimits


class Times(NamedTuple):
    """The times of a request's configurations in one run.

    `of` has the median microseconds of each at each placement, and `few` those of calls with 16 rows.
    """

    run: str
    request: Request
    of: dict[Any, list[float]]
    few: dict[Any, float]

    @property
    def family(self) -> str:
        return declaration_of(self.request.operator).family.name

    @property
    def way(self) -> str:
        """Whose rule it is for."""
        return f"{self.family}, {'backward' if 'backward' in self.request.operator else 'forward'}"

    @property
    def row(self) -> Any:
        """What the request's configuration depends on."""
        if self.request.operator not in NORMS:
            return row_of(self.request)
        return backward_row(self.request) if NORMS[self.request.operator].backward else forward_row(self.request)

    @property
    def types(self) -> str:
        """Its data types, for people."""
        return "/".join(dict.fromkeys(dtype.name for dtype in self.request.dtypes.values() if dtype))

    def by_rule(self, limits: DeviceLimits) -> Any:
        """Return the configuration that the rule alone finds."""
        if self.request.operator not in NORMS:
            return rule(self.row, limits)
        return (backward_rule if NORMS[self.request.operator].backward else forward_rule)(self.row, limits)

    def microseconds(self, config: Any) -> float:
        return statistics.median(self.of[config])

    def gain(self, config: Any, other: Any) -> tuple[float, float]:
        """Return how much faster one is than another, and half the range of that over the placements."""
        pairs = zip(self.of[config], self.of[other], strict=False)  # the fastest ones were timed at more placements
        gains = [theirs / ours - 1 for ours, theirs in pairs]
        return statistics.median(gains), (max(gains) - min(gains)) / 2


def read(path: str) -> Iterator[Times]:
    """Yield the times of each request of which a run timed two configurations or more."""
    text = gzip.decompress(Path(path).read_bytes()) if path.endswith(".gz") else Path(path).read_bytes()
    for measured in json.loads(text)["requests"]:
        asked = parse(json.dumps(measured["request"]))
        assert isinstance(asked, Asked)
        kind = NormConfig if asked.request.operator in NORMS else SoftmaxConfig
        found, few = {}, {}
        for one in measured["configurations"]:
            times = [statistics.median(calls) for calls in one["again_us"] or one["first_us"]]
            if times and all(map(math.isfinite, times)):
                config = kind(**one["config"])
                found[config] = times
                if one["few_us"]:
                    few[config] = statistics.median(one["few_us"]["16"])
        if len(found) > 1:
            yield Times(Path(path).name, asked.request, found, few)
