# SPDX-License-Identifier: Apache-2.0
"""The machine's interface: see native/module.cpp."""

from collections.abc import Sequence
from typing import Any

class Module:
    def __init__(self, path: str) -> None: ...
    def static_shared_memory(self, of_run: bool) -> int: ...
    def parameter_bytes(self, kernel: str) -> int: ...
    def max_threads(self, kernel: str) -> int: ...
    def run(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        dynamic_shared_memory: int,
        cooperative: bool,
        params: bytes,
        memory: Sequence[tuple[int, bool, bool, str, int, int, int, int, int, int]],
        knows_memory: bool,
        endless_seconds: float,
        checked: bool,
        schedule: int,
        seed: int,
    ) -> tuple[Any, Any]: ...
