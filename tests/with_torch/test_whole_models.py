# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of whole models run, at a tiny size in the simulator, and what they compute is right."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import kernel_cache
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(program: str, *arguments: str, **environment: str) -> str:
    pytest.importorskip("transformers")
    command = [sys.executable, str(BENCHMARKS / program), *arguments]
    shared = {"TRANSFORMER_RTC_CACHE_DIR": str(kernel_cache.folder or "")}
    done = subprocess.run(
        command, env=os.environ | shared | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_of_all_models_begin_with_the_same_loss_whatever_runs_the_norms(tmp_path):
    file = tmp_path / "train.json"
    printed = run(
        "train_step.py", "--tiny", "--ways", "eager,torch.nn,ours", "--rounds", "2", "--steps", "1", "--json", str(file)
    )
    models = json.loads(file.read_text())["models"]
    assert [model["model"] for model in models] == ["llama", "qwen3", "gemma3", "gpt2", "bert"]
    for model in models:
        assert not model["failures"]
        losses = {way: found["first_loss"] for way, found in model["ways"].items()}
        assert losses["ours"] == pytest.approx(losses["eager"], abs=2e-2)
        assert losses["eager"] == pytest.approx(math.log(64), rel=0.05)  # 64 tokens that nothing was learnt of
        assert all(len(found["ms"]) == 2 and min(found["ms"]) > 0 for found in model["ways"].values())
        assert f"{model['model']}: " in printed
    again = run("train_step.py", "--from-json", str(file), str(file))
    assert again.count("\nllama: ") == 2


def test_a_first_step_compiles_with_an_empty_cache_and_not_with_a_full_one(tmp_path):
    found = [
        json.loads(run("first_step.py", "llama", "ours", "--tiny", TRANSFORMER_RTC_CACHE_DIR=str(tmp_path)))
        for _ in range(2)
    ]
    assert found[0]["kernels_compiled"] > 0 == found[1]["kernels_compiled"]
    assert found[0]["loss"] == found[1]["loss"]
    assert all(0 < one["prepare_seconds"] + one["warmup_seconds"] < one["seconds"] for one in found)


def test_loss_curves_of_ours_are_those_of_eager_mode(tmp_path, benchmark):
    file = tmp_path / "losses.json"
    options = ("--models", "none", "--loss-curves", "2", "--loss-steps", "24")
    printed = run("train_step.py", "--tiny", *options, "--json", str(file))
    curves = benchmark("loss_curves")
    runs = json.loads(file.read_text())["loss_curves"]
    assert len(runs) == 2 * len(curves.RUNS) and all(len(one["losses"]) == 24 for one in runs)
    first, last = ([sum(one["losses"][part]) for one in runs] for part in (slice(0, 8), slice(16, 24)))
    assert all(b < a for a, b in zip(first, last, strict=True))
    ours, eager = (curves.Run(curves.AUTOCAST, way) for way in ("ours", "eager"))
    assert curves.largest_difference(runs, ours, eager) < 1e-2
    assert "24 steps, 2 seeds" in printed


def test_the_largest_difference_is_of_means_of_the_same_seed(benchmark):
    curves = benchmark("loss_curves")
    one, other = curves.Run("p", "one"), curves.Run("p", "other")
    losses = {(one, 0): [1.0] * 20, (other, 0): [1.0] * 10 + [2.0, 0.5] * 5, (one, 1): [7.0], (other, 1): [7.125]}
    runs = [{**run._asdict(), "seed": seed, "losses": found} for (run, seed), found in losses.items()]
    assert curves.largest_difference(runs, one, other) == 0.25


def test_tokens_of_all_seeds_are_of_one_chain(benchmark):
    curves = benchmark("loss_curves")
    tokens = torch.cat([curves.chain_of_tokens(20, 8, 40, 16, seed) for seed in (0, 1)]).flatten(0, 1)
    assert not torch.equal(tokens[:160], tokens[160:])
    pairs = {(int(a), int(b)) for a, b in zip(tokens[:, :-1].flatten(), tokens[:, 1:].flatten(), strict=True)}
    successors = [sum(pair[0] == token for pair in pairs) for token in range(16)]
    assert min(successors) >= 1 and max(successors) <= curves.SUCCESSORS


def test_decoding_by_our_norms_gives_the_logits_of_torchs(tmp_path):
    file = tmp_path / "decode.json"
    run("decode.py", "--tiny", "--batches", "1,3", "--json", str(file))
    for found in json.loads(file.read_text())["batches"]:
        assert set(found["errors"]) == {"LlamaRMSNorm", "F.rms_norm", "ours", "ours, sum included"}
        assert max(found["errors"].values()) < 1e-5


def test_two_processes_have_the_gradients_of_one(tmp_path):
    file = tmp_path / "two.json"
    run("two_gpus.py", "--tiny", "--rounds", "1", "--steps", "1", "--json", str(file))
    result = json.loads(file.read_text())
    assert [found["wrapper"] for found in result["checks"]] == ["DDP", "FSDP2"]
    for found in result["checks"]:
        assert found["gradient_error"] < 1e-5 and found["loss_error"] < 1e-5
        assert found["same_parameters"] is not False
        assert len(set(found["losses"])) > 1
