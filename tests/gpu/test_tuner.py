# SPDX-License-Identifier: Apache-2.0
"""The tuner on a GPU: what it measures, writes and keeps, and what later calls make of it."""

from __future__ import annotations

import json
import random

import pytest
from processes import output

from transformer_rtc import device_limits, warming
from transformer_rtc.declaration import declaration_of
from transformer_rtc.device import Gpu
from transformer_rtc.tuner import fastest, tune
from transformer_rtc.tuner_bench import GpuBench
from transformer_rtc.tuning import read

# A size that no run measured, and rows of which few divisions fit.
ASKED = (
    ("rms_norm", "bfloat16", 5376, {}),
    ("layer_norm_backward", "float32", 1664, {"dresidual": True}),
    ("rms_norm", "bfloat16", 128, {"per_head": True}),
    ("add_rms_norm", "bfloat16", 4096, {"out_dtype": "float8_e4m3fn", "scale": True, "amax": True}),
    ("softmax", "bfloat16", 1000, {"mask": "bool"}),
    ("softmax", "float32", 2048, {"causal": "aligned", "sink": True, "return_lse": True}),
    ("softmax_backward", "bfloat16", 3000, {}),
)


def request_of(name, dtype, columns, given):
    given = dict(given)
    (request,) = warming._requests(name, dtype, columns, given.pop("per_head", False), False, given)
    return request


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked[0]}-{asked[1]}-{asked[2]}")
def test_every_configuration_that_is_timed_takes_some_time(asked, monkeypatch):
    request = request_of(*asked)
    family = declaration_of(request.operator).family
    every = family.configurations(request, device_limits(0))
    some = (every[0], *random.sample(every[1:], min(10, len(every) - 1)))
    monkeypatch.setattr(family, "configurations", lambda *_: some)
    bench = GpuBench(request, 0, most_bytes=32 << 20)
    assert bench.configs[0] == every[0] and len(bench.configs) >= len(some) - 2
    times = bench.times(bench.configs, 3)
    assert set(times) == set(bench.configs)
    # 32 MiB cannot be read faster than that, and no kernel takes a millisecond for each of them.
    assert all(3 < one < 32_000 for found in times.values() for one in found)
    assert fastest(bench)[0] in bench.configs
    bench.close()


CALL = """
import json, torch, transformer_rtc
from transformer_rtc import manager, record
x = torch.randn(64, 5376, device="cuda").to(torch.bfloat16)
weight = torch.randn(5376, device="cuda").to(torch.bfloat16)
y = transformer_rtc.rms_norm(x, weight)
expected = torch.nn.functional.rms_norm(x.double(), (5376,), weight.double(), eps=1e-6)
shifted = torch.empty(64 * 5376 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 5376).copy_(x)
with record() as entries:
    same = torch.equal(transformer_rtc.rms_norm(shifted, weight), y)
print(json.dumps({
    "compiles": manager.counts["compile"],  # of both kinds of rows
    "config": entries[-1].config,
    "error": ((y.double() - expected).abs() / (expected.abs() + 1)).max().item(),
    "same": same,
}))
"""


def test_a_later_process_has_what_was_found_and_compiles_nothing(tmp_path):
    request = request_of("rms_norm", "bfloat16", 5376, {})
    path, cache = str(tmp_path / "t.jsonl"), str(tmp_path / "cache")
    script = f"""
from transformer_rtc import warming
from transformer_rtc.tuner import tune
(request,) = warming._requests("rms_norm", "bfloat16", 5376, False, False, {{}})
(record,), left = tune([request], 0, {path!r})
assert not left and record.configurations > 20, record
"""
    output(script, CACHE_DIR=cache)
    found = read(path)
    assert (found.device, found.architecture) == (Gpu(0).product, device_limits(0).architecture)
    row = found.row(request)
    assert row is not None and -0.05 < row.gain < 2
    told = json.loads(output(CALL, CACHE_DIR=cache, TUNING=path).splitlines()[-1])
    assert told["compiles"] == 0 and told["config"] == row.config and told["same"] and told["error"] < 0.01
    (record,), _ = tune([request], 0, path)
    assert record.configurations == 0
