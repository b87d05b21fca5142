# SPDX-License-Identifier: Apache-2.0
"""The tuner, with times that are made up; and the calls that it times, in the simulator."""

from __future__ import annotations

import json
import math
import random
import sys

import ml_dtypes
import numpy as np
import pytest
from cases import CASES
from stubs import Compiler, in_threads

from transformer_rtc import (
    ArgumentError,
    DriverError,
    SettingsError,
    SimulatedDevice,
    cli,
    recording,
    tuner,
    tuning,
    using,
    warming,
)
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.operator import Operator
from transformer_rtc.settings import Settings
from transformer_rtc.spec import ARCHITECTURES, Target
from transformer_rtc.tuner import fastest, tune
from transformer_rtc.tuner_bench import ArrayOf, _random, arguments_of
from transformer_rtc.tuning import Tuning, TuningRow, values_of

DEVICE = "NVIDIA X"
REQUESTS = [
    request
    for name in ("rms_norm", "layer_norm_backward", "softmax")
    for request in warming._requests(name, ["bfloat16", "float32"], [1024, 4096], False, False, {})
]


class MadeUp:
    """Times as they are given, of which each call differs by a part of it."""

    def __init__(self, microseconds, few=None, noise=0.001):
        self.configs, self.microseconds, self.noise = list(microseconds), microseconds, noise
        self.few, self.calls = few or dict.fromkeys(microseconds, 5.0), []
        self.only_whole = {"whole"}  # configurations that cannot be launched for unaligned rows

    def takes_unaligned(self, config):
        return config not in self.only_whole

    def close(self):
        self.closed = True

    def times(self, configs, repetitions, rows=None):
        self.calls.append((len(configs), repetitions, rows))
        of = self.microseconds if rows is None else self.few
        place = 1 + random.uniform(0, 0.1)  # all are slower where arrays lie badly
        return {
            one: [of[one] * place * (1 + random.uniform(-self.noise, self.noise)) for _ in range(repetitions)]
            for one in configs
        }


def test_the_fastest_is_found_among_many():
    times = {"default": 100.0} | {f"c{n}": random.uniform(97, 300) for n in range(200)} | {"best": 90.0}
    bench = MadeUp(times)
    best, gain, spread = fastest(bench)
    assert best == "best" and gain == pytest.approx(0.111, abs=0.003) and 0 <= spread < 0.003
    assert bench.calls[0] == (202, 3, None) and all(count <= 26 for count, *_ in bench.calls[1:])


@pytest.mark.parametrize(
    ("times", "few", "noise", "expected"),
    [
        ({"default": 100.0, "a": 99.0, "b": 120.0}, None, 0.001, "default"),  # too little
        ({"default": 100.0, "a": 96.0, "b": 95.5}, None, 0.0001, "b"),
        ({"default": 100.0, "a": 96.0, "b": 95.0}, {"default": 5.0, "a": 5.1, "b": 6.0}, 0.0001, "a"),  # b: few rows
        ({"default": 100.0, "whole": 94.0, "a": 95.0}, None, 0.0001, "a"),
        ({"default": 100.0}, None, 0.001, "default"),
    ],
)
def test_the_default_stays_unless_enough_is_gained(times, few, noise, expected):
    assert fastest(MadeUp(times, few, noise))[0] == expected


def test_a_gain_within_its_spread_is_none():
    class Unsteady(MadeUp):
        def times(self, configs, repetitions, rows=None):
            # Faster or slower by where the arrays lie.
            found = super().times(configs, repetitions, rows)
            self.factor = 0.9 if len(self.calls) % 2 else 1.02
            return found | ({"a": [one * self.factor for one in found["a"]]} if rows is None and "a" in found else {})

    assert fastest(Unsteady({"default": 100.0, "a": 100.0}))[0] == "default"


# ---- Files -----------------------------------------------------------------------------------------------------------


class FakeGpu:
    def __init__(self, ordinal):
        assert ordinal == 0
        self.product, self.limits = DEVICE, ARCHITECTURES[90]


@pytest.fixture
def gpu(monkeypatch, tmp_path) -> Compiler:
    """Have a GPU whose kernels take as long as their number among a request's configurations, the last ones least."""
    made = Compiler()
    monkeypatch.setattr(tuner, "Gpu", FakeGpu)
    monkeypatch.setattr(tuner, "manager", KernelManager(DiskCache(str(tmp_path / "cache")), made, lambda: "nvrtc 1"))

    def bench_of(request, device):
        configs = declaration_of(request.operator).family.configurations(request, ARCHITECTURES[90])
        return MadeUp({config: 200.0 - number / len(configs) for number, config in enumerate(configs)} | {
            configs[-1]: 150.0
        })  # fmt: skip

    monkeypatch.setattr(tuner, "_gpu_bench", bench_of)
    made.bench_of = bench_of
    return made


def test_what_is_faster_is_in_the_file_and_in_the_cache(gpu, tmp_path):
    path = str(tmp_path / "t.jsonl")
    told = []
    records, left = tune(REQUESTS, 0, path, progress=lambda *one: told.append(one), bench_of=gpu.bench_of)
    assert (
        not left
        and len(records) == len(REQUESTS) == len(told) - 2
        and told[-2:] == [(records[-1], 12, 12), (None, 12, 12)]
    )
    found = tuning.read(path)
    assert (found.device, found.architecture, len(found.rows)) == (DEVICE, 90, 12)
    for request, record in zip(REQUESTS, records, strict=True):
        family = declaration_of(request.operator).family
        configs = family.configurations(request, ARCHITECTURES[90])
        assert record.row.config == values_of(configs[-1]) and record.row.gain == pytest.approx(1 / 3, abs=0.01)
        assert found.config(request, ARCHITECTURES[90]) == configs[-1] != configs[0]
        assert (record.fastest, record.default) == (
            configs[-1].symbol,
            configs[0].symbol,
        ) and record.configurations == len(configs)
        for unaligned in (False, True):
            for spec, _ in family.specialise(request._replace(unaligned=unaligned), ARCHITECTURES[90], configs[-1]):
                assert spec.symbol in gpu.symbols
    # What is in the file is not measured again, unless it is asked for.
    compiled = len(gpu.symbols)
    records, _ = tune(REQUESTS, 0, path, bench_of=None)
    assert [record.configurations for record in records] == [0] * 12 and len(gpu.symbols) == compiled
    records, _ = tune(REQUESTS[:1], 0, path, again=True, bench_of=gpu.bench_of)
    assert records[0].configurations > 1 and len(tuning.read(path).rows) == 12


def test_what_the_time_does_not_suffice_for_is_left_for_another_run(gpu, tmp_path):
    path = str(tmp_path / "t.jsonl")
    records, left = tune(REQUESTS, 0, path, minutes=0.0, bench_of=gpu.bench_of)
    assert (records, left) == ([], REQUESTS)
    records, left = tune(REQUESTS[:5], 0, path, bench_of=gpu.bench_of)
    records, left = tune(REQUESTS, 0, path, minutes=0.0, bench_of=gpu.bench_of)
    assert len(records) == 5 and left == REQUESTS[5:]


def test_another_device_s_file_is_not_written(gpu, tmp_path, monkeypatch):
    path = str(tmp_path / "t.jsonl")
    tuning.write(path, Tuning("another", 90, [TuningRow(REQUESTS[0], None)]))
    with pytest.raises(ArgumentError, match="is of another, and this device is NVIDIA X"):
        tune(REQUESTS, 0, path, bench_of=gpu.bench_of)
    assert tuning.read(path).device == "another"
    monkeypatch.setattr(tuning, "file_for", lambda device: None)
    with pytest.raises(SettingsError, match="there is no tuning file to write"):
        tune(REQUESTS, 0, bench_of=gpu.bench_of)


def test_kernels_of_every_request_of_a_case_are_kept(gpu, tmp_path):
    asked = [
        request
        for given in ({}, {"return_rstd": True})
        for request in warming._requests("rms_norm", ["bfloat16", "float16"], 4096, False, False, given)
    ]
    for _ in range(2):  # of what is measured, and of what is in the file
        gpu.symbols.clear()
        records, _ = tune(asked, 0, str(tmp_path / "t.jsonl"), bench_of=gpu.bench_of)
        assert len(records) == 1
        for request in asked:
            config = tuning.read(tmp_path / "t.jsonl").config(request, ARCHITECTURES[90])
            (spec, _), *_ = declaration_of("rms_norm").family.specialise(request, ARCHITECTURES[90], config)
            assert tuner.manager.in_memory(spec, Target(90))


def test_a_row_of_another_version_is_measured_again(gpu, tmp_path):
    path = str(tmp_path / "t.jsonl")
    tuning.write(path, Tuning(DEVICE, 90, [TuningRow(REQUESTS[0], {"threads": 3}, 0.5)]))
    (record,), _ = tune(REQUESTS[:1], 0, path, bench_of=gpu.bench_of)
    assert record.configurations > 0 and tuning.read(path).rows == (record.row,)


def test_what_cannot_be_measured_is_told_and_the_others_go_on(gpu, tmp_path):
    path = str(tmp_path / "t.jsonl")

    def bench_of(request, device):
        if request == REQUESTS[0]:
            raise DriverError("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY")
        return gpu.bench_of(request, device)

    records, left = tune(REQUESTS[:3], 0, path, bench_of=bench_of)
    assert [bool(record.problem) for record in records] == [True, False, False] and not left
    assert "not measured: cuMemAlloc failed" in tuner.sentence(records[0])
    assert len(tuning.read(path).rows) == 2 and json.dumps(list(map(tuner.document, records)))

    def broken(request, device):
        raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(DriverError):
        tune(REQUESTS[3:], 0, path, bench_of=broken)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(gpu, tmp_path):
    for path in (tmp_path, tmp_path / "file" / "t.jsonl"):
        (tmp_path / "file").touch()
        with pytest.raises((SettingsError, ArgumentError), match=f"the tuning file {path} cannot be"):
            tune(REQUESTS, 0, str(path), bench_of=None)


def test_processes_that_tune_at_once_lose_no_row(gpu, tmp_path):
    path = str(tmp_path / "t.jsonl")
    in_threads(4, lambda number: tune(REQUESTS[3 * number : 3 * number + 3], 0, path, bench_of=gpu.bench_of))
    assert len(tuning.read(path).rows) == len(REQUESTS)


def test_the_command_says_what_was_found(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(cli._native, "current_device", lambda: 0)
    monkeypatch.setattr(cli, "device_of", FakeGpu)
    monkeypatch.setattr(tuner, "tune", lambda *given: tune(*given, bench_of=gpu.bench_of))
    options = Settings(False, str(tmp_path), "", "allow", 0, None, 0, None)
    monkeypatch.setattr(cli, "file_for", lambda device: tuning.file_for(device, options))
    command = ["tune", "rms_norm", "softmax", "--dtype", "bfloat16", "--hidden", "4096"]
    assert cli.main([*command, "--minutes", "0"]) == 0
    assert "2 were not measured in 0 minutes: run the command again" in capsys.readouterr().out
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert f"2 of 2 are faster by a row of {tmp_path}/tuning.NVIDIA-X.jsonl" in printed.out
    # By lines of the result itself where there is no tqdm, and not again at the end.
    assert printed.err == "" and printed.out.count("rms_norm of 4096 columns, bfloat16: 1.33") == 1
    assert cli.main([*command, "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [record["request"]["operator"] for record in found["records"]] == ["rms_norm", "softmax"]
    assert found["left"] == [] and printed.err == ""
    assert cli.main(["tune"]) == 2 and "there is nothing to tune" in capsys.readouterr().err


# ---- Calls -----------------------------------------------------------------------------------------------------------


def array(value: ArrayOf, rng: np.random.Generator) -> np.ndarray:
    size = math.prod(value.shape) * value.dtype.bytes
    some = np.resize(_random(value.dtype, rng), size)
    dtype = getattr(ml_dtypes, value.dtype.name, None) or np.dtype(value.dtype.name)
    return some.view(dtype).reshape(value.shape)


@pytest.mark.parametrize("case", [case for case in CASES if case.hidden <= 4096][::23], ids=lambda case: case.name)
def test_the_calls_that_are_timed_ask_for_the_request(case, rng):
    hold_call(case.request._replace(margin=False), rng)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"mask": "bool"}, {"mask": "float32"}, {"causal": "aligned"},
        {"causal": True, "sink": True, "return_lse": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("operator", ["softmax", "softmax_backward"])
def test_the_calls_of_softmax_that_are_timed_ask_for_the_request(operator, given, rng):
    names = warming._names(operator)
    if operator == "softmax_backward":
        given = {name: value for name, value in given.items() if (name, value) != ("mask", "bool")}
        given |= {"lse": True} if "sink" in given else {}
    given = {name: value for name, value in given.items() if name in names}
    (request,) = warming._requests(operator, "bfloat16", 128, False, False, given)
    hold_call(request, rng)


def hold_call(request, rng):
    values = arguments_of(request, 40)
    made = [array(value, rng) if isinstance(value, ArrayOf) else value for value in values]
    with recording.record() as entries, using(SimulatedDevice(multiprocessors=4)):
        Operator(declaration_of(request.operator)).call(*made)
    asked = entries[-1].request
    assert asked._replace(unaligned=False) == request._replace(unaligned=False)
