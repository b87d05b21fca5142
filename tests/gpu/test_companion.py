# SPDX-License-Identifier: Apache-2.0
"""The first step of a patched model loads every kernel from the companion wheel, and compiles none."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import output

from transformer_rtc import device_limits
from transformer_rtc.spec import ARCHITECTURES

pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "companion"
STEP = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import torch
import make_list, models
import transformer_rtc as t
told = set()
t.manager.on_event(lambda event: told.add((event.kind, event.origin)))
model = models.MODELS["llama-3.2-1b"]
sizes = dict(model.sizes, vocab_size=64, intermediate_size=256, pad_token_id=0)
module, _ = make_list.made(model._replace(sizes=sizes), 1, "cuda")
module.to(torch.bfloat16)
module(input_ids=torch.arange(64, device="cuda")[None]).last_hidden_state.float().square().mean().backward()
torch.cuda.synchronize()
print(sorted(told), t.manager.counts["load"] >= 4)
"""


def test_the_first_step_of_a_patched_llama_compiles_nothing(tmp_path):
    architecture = device_limits(0).architecture
    if architecture not in ARCHITECTURES:
        pytest.skip(f"the companion wheel has no kernels for sm_{architecture}")
    command = [sys.executable, str(FOLDER / "build.py"), "--models", "llama-3.2-1b", "-o", str(tmp_path)]
    subprocess.run([*command, "--architectures", f"sm_{architecture}"], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = output(STEP, {"PYTHONPATH": path}, CACHE_DIR=str(tmp_path / "cache"), ON_COMPILE="error")
    assert told == "[('load', 'companion')] True" and not (tmp_path / "cache").exists()
