"""Distributed tensors, sharded parameters and data parallelism, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, shared

RANKS = Path(__file__).parents[1] / "support" / "ranks.py"
CASES = ["norms", "scores", "planes", "compiled", "data_parallel", "sequence_parallel"]


def test_two_processes_find_what_one_does(tmp_path, torch):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(RANKS), str(tmp_path / "store")],
        env=environment(**shared(tmp_path)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == CASES
