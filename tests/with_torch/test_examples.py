# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/, each at its tiny size on the CPU, as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each must have called, beside what it prints.
OPERATORS = {
    "hugging_face": {"rms_norm", "rms_norm_backward"},
    "megatron_softmax": {"softmax", "softmax_backward"},
    "training_loop": {"rms_norm", "add_rms_norm", "softmax", "softmax_backward", "rms_norm_backward"},
}


def test_each_example_is_run_and_has_a_line_in_the_docs():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == OPERATORS.keys()
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for name in OPERATORS:
        assert page.count(f"python examples/{name}.py") == 2 and f"](../examples/{name}.py)" in page


@pytest.mark.parametrize("name", OPERATORS)
def test_an_example_runs_on_the_cpu(name, tmp_path):
    if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    recorded = tmp_path / "recorded"
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--tiny"],
        env=processes.environment(**processes.shared(tmp_path), RECORD=str(recorded)) | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    used = {json.loads(line)["operator"] for line in recorded.read_text().splitlines()}
    assert used >= OPERATORS[name]
    losses = [float(loss) for loss in re.findall(r"loss +(\S+)", done.stdout)]
    errors = [float(error) for error in re.findall(r"difference (\S+) of", done.stdout)]
    assert len(losses) >= 3 or len(errors) == 3
    assert not losses or losses[-1] < losses[0] - 0.5
    assert max(errors, default=0.0) < 1e-5
