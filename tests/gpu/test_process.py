from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from transformer_rtc import static

# numpy alone: a framework may open libnvrtc for itself.
CALL = """
import numpy as np, transformer_rtc
x = np.random.default_rng(0).standard_normal((7, 4096)).astype(np.float32)
y = transformer_rtc.rms_norm(x)
reference = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
assert abs(y - reference).max() < 1e-5, abs(y - reference).max()
nvrtc = any('libnvrtc' in line for line in open('/proc/self/maps'))
print(dict(transformer_rtc.manager.counts), nvrtc, y.tobytes().hex()[:64])
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMER_RTC_")}
    settings = {f"TRANSFORMER_RTC_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **settings},
        cwd=os.path.dirname(__file__),  # not a source tree: Python would import from it
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(script: str, **variables: str) -> str:
    done = run(script, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def needs_static() -> None:
    if not static.available():
        pytest.skip("this installation was built without static kernels")


def test_a_second_process_neither_compiles_nor_opens_nvrtc(tmp_path):
    cold = output(CALL, CACHE_DIR=str(tmp_path))
    # The test can fail: the first process shows what it opened.
    assert cold.startswith("{'compile': 1, 'load': 1} True")
    warm = output(CALL, CACHE_DIR=str(tmp_path))
    assert warm.startswith("{'load': 1} False")
    assert warm.split()[-1] == cold.split()[-1]
    assert run(CALL, CACHE_DIR=str(tmp_path), ON_COMPILE="error").returncode == 0


def test_after_a_warm_up_for_this_gpu_no_call_compiles(tmp_path):
    sizes = "[64, 1000, 4096, 131072]"
    warm = (
        "import transformer_rtc as t\n"
        "names = ['rms_norm', 'layer_norm', 'rms_norm_add', 'rms_norm_backward', 'add_layer_norm_backward']\n"
        f"found = t.warmup(names, ['float32', 'float16'], {sizes})\n"
        "assert {each.status for each in found} == {'compiled'}, found\n"
        "print(dict(t.manager.counts) == {'compile': len(found)})"
    )
    assert output(warm, CACHE_DIR=str(tmp_path)) == "True"
    calls = (
        "import numpy as np, transformer_rtc as t\n"
        "t.freeze()\n"
        "def call(n, dtype):\n"
        "    x, w = np.ones((5, n), dtype), np.ones(n, dtype)\n"
        "    t.rms_norm(x, w); t.layer_norm(x, w, w); t.rms_norm_add(x, x, w)\n"
        "    t.rms_norm_backward(x, x, w); t.add_layer_norm_backward(x, x, x, w)\n"
        f"for n in {sizes}:\n"
        "    for dtype in (np.float32, np.float16): call(n, dtype)\n"
        "print(t.manager.counts['compile'])\n"
        "try: call(96, np.float32)\n"
        "except t.UnexpectedCompileError as error: print(error.manifest_line)"
    )
    compiles, line = output(calls, CACHE_DIR=str(tmp_path)).splitlines()
    assert compiles == "0" and '"operator": "rms_norm"' in line and '"columns": 96' in line


def test_without_a_disk_cache_each_process_compiles():
    for _ in range(2):
        assert output(CALL, CACHE_DIR="").startswith("{'compile': 1, 'load': 1} True")


def test_a_cache_that_cannot_be_written_costs_a_warning_and_not_the_call():
    done = run(CALL, CACHE_DIR="/dev/null/x")
    assert done.returncode == 0 and done.stderr.count("RuntimeWarning") == 1


def test_a_process_ends_quietly(tmp_path):
    done = run(CALL, CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forbidden_compile_is_a_typed_error(tmp_path):
    done = run(CALL, CACHE_DIR=str(tmp_path), ON_COMPILE="error")
    assert done.returncode != 0 and "UnexpectedCompileError: rms_norm_forward_f32_no_weight" in done.stderr
    assert os.listdir(tmp_path) == []


def test_an_announced_compile_warns(tmp_path):
    done = run(CALL, CACHE_DIR=str(tmp_path), ON_COMPILE="warn")
    assert done.returncode == 0 and "RuntimeWarning: transformer_rtc compiles rms_norm_forward_f32" in done.stderr


@pytest.mark.usefixtures("needs_static")
def test_forced_static_opens_no_nvrtc_compiles_nothing_and_keeps_nothing(tmp_path):
    found = output(CALL, CACHE_DIR=str(tmp_path), FORCE_STATIC="1")
    assert found.startswith("{'load': 1} False") and os.listdir(tmp_path) == []


@pytest.mark.usefixtures("needs_static")
def test_forced_static_is_the_only_implementation_and_contradictions_name_both():
    script = """
import transformer_rtc as t
print(t.implementations(t.rms_norm))
with t.using("static"): pass
try:
    with t.using("rtc"): pass
except t.SettingsError as error: print(error)
"""
    found = output(script, FORCE_STATIC="1").splitlines()
    assert found == ["['static']", "using('rtc') contradicts TRANSFORMER_RTC_FORCE_STATIC=1"]
    assert output(script).splitlines() == ["['rtc', 'static', 'simulator']"]


def test_nothing_selects_the_static_kernels_silently(tmp_path):
    # Without a compiler a call fails; it does not fall back.
    script = (
        f"import sys\nfrom transformer_rtc import compiler\ncompiler._installed_version = lambda name: None\n{CALL}"
    )
    done = run(script, CACHE_DIR=str(tmp_path))
    assert done.returncode != 0 and re.search(r"CompilerNotFoundError: .*transformer_rtc\[cu12\]", done.stderr)


def test_a_choice_is_of_its_block_and_its_thread(tmp_path):
    script = """
import threading, transformer_rtc as t
from transformer_rtc import dispatch
seen = []
with t.using("static"):
    seen.append(dispatch._chosen.get())
    thread = threading.Thread(target=lambda: seen.append(dispatch._chosen.get())); thread.start(); thread.join()
    with t.using("rtc"): seen.append(dispatch._chosen.get())
    seen.append(dispatch._chosen.get())
seen.append(dispatch._chosen.get())
print([dispatch.IMPLEMENTATIONS[i] for i in seen])
try:
    with t.using("simulated"): pass
except t.ArgumentError as error: print(error)
"""
    assert output(script).splitlines() == [
        "['static', 'rtc', 'rtc', 'static', 'rtc']",
        "implementation is 'simulated'; it takes rtc, static, simulator or a SimulatedDevice",
    ]


def test_log_1_is_a_line_for_each_compile_and_load(tmp_path):
    lines = run(CALL, CACHE_DIR=str(tmp_path), LOG="1").stderr.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"transformer_rtc: compile (\w+) sm_\d+ [\d.]+ ms, \d+ bytes from compiler", lines[0])
    assert re.fullmatch(r"transformer_rtc: load (\w+) cuda:0 [\d.]+ ms, \d+ bytes from compiler", lines[1])
    (warm,) = run(CALL, CACHE_DIR=str(tmp_path), LOG="1").stderr.splitlines()
    assert warm.startswith("transformer_rtc: load ") and warm.endswith("from disk")


def test_log_2_shows_program_and_resource_report(tmp_path):
    text = run(CALL, CACHE_DIR=str(tmp_path), LOG="2").stderr
    assert '#include "norm_forward.cu"' in text and re.search(r"Used \d+ registers", text)


def test_a_malformed_setting_is_a_typed_error():
    done = run(CALL, FORCE_STATIC="yes")
    assert done.returncode != 0 and "SettingsError: TRANSFORMER_RTC_FORCE_STATIC is 'yes'; it takes 0, 1" in done.stderr
