# SPDX-License-Identifier: Apache-2.0
"""The configurations that are shipped: of cases in which measurements found one that is faster than the rule's."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from ..spec import DeviceLimits
from .division import RowDivision, has_clusters, most_ctas

__all__ = ["FILE", "case_key", "rows_of", "shipped"]

# benchmarks/tune.py writes it: of each architecture, by a case's key, a request of it, the values of its configuration,
# and what that gained in each run.
FILE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tuning.json")

_Config = TypeVar("_Config", bound=RowDivision)


class _Row(Protocol):
    """What a configuration depends on."""

    @property
    def case(self) -> tuple[object, ...]: ...

    def fits(self, config: Any, limits: DeviceLimits) -> bool: ...


def case_key(case: tuple[object, ...]) -> str:
    """Return the key of a case (`Family.case`)."""
    return json.dumps(case)


def rows_of(architecture: int) -> dict[str, dict[str, Any]]:
    """Return what is shipped for an architecture, by the keys of cases."""
    return _file().get(f"sm_{architecture}", {})


@lru_cache(maxsize=1)
def _file() -> dict[str, dict[str, dict[str, Any]]]:
    with open(FILE, encoding="utf-8") as file:
        found: dict[str, dict[str, dict[str, Any]]] = json.load(file)
    return found


def shipped(row: _Row, limits: DeviceLimits, kind: type[_Config]) -> _Config | None:
    """Return the configuration that is shipped for a row; None: there is none, or it does not fit the device."""
    found = rows_of(limits.architecture).get(case_key(row.case))
    if found is None:
        return None
    config = kind(**found["config"])
    if config.ctas_per_row > most_ctas(limits) or (config.clusters and not has_clusters(limits)):
        return None
    return config if row.fits(config, limits) else None
