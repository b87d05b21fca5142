# SPDX-License-Identifier: Apache-2.0
"""Processes of their own on a GPU: settings, forks, contexts and ends."""

from __future__ import annotations

import os
import re
import threading

import pytest
from processes import CALLS, SPAWN, output, run, shared, threads

from transformer_rtc import select, static, using

# numpy alone: a framework may open libnvrtc for itself.
CALL = """
import numpy as np, transformer_rtc
x = np.random.default_rng(0).standard_normal((7, 4096)).astype(np.float32)
y = transformer_rtc.rms_norm(x)
reference = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
assert abs(y - reference).max() < 1e-5, abs(y - reference).max()
print(dict(transformer_rtc.manager.counts), "libnvrtc" in opened(), y.tobytes().hex()[:64])
"""
needs_static = pytest.mark.skipif(not static.available(), reason="this installation was built without static kernels")


def test_a_second_process_neither_compiles_nor_opens_nvrtc_and_each_ends_quietly(tmp_path):
    cold = run(CALL, CACHE_DIR=str(tmp_path), LOG="1")
    # The test can fail: the first process shows what it opened.
    assert cold.stdout.startswith("{'compile': 1, 'load': 1} True")
    compiled, loaded = cold.stderr.splitlines()
    assert re.fullmatch(r"transformer_rtc: compile (\w+) sm_\d+ [\d.]+ ms, \d+ bytes from compiler", compiled)
    assert re.fullmatch(r"transformer_rtc: load (\w+) cuda:0 [\d.]+ ms, \d+ bytes from compiler", loaded)
    warm = run(CALL, CACHE_DIR=str(tmp_path), LOG="1", ON_COMPILE="error")
    assert warm.returncode == 0 and warm.stdout.startswith("{'load': 1} False")
    assert warm.stdout.split()[-1] == cold.stdout.split()[-1]
    (loaded,) = warm.stderr.splitlines()
    assert loaded.startswith("transformer_rtc: load ") and loaded.endswith("from disk")
    done = run(CALL, CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("settings", "code", "stdout", "stderr"),
    [
        ({"CACHE_DIR": ""}, 0, r"\{'compile': 1, 'load': 1\} True", ""),
        ({"CACHE_DIR": "/dev/null/x"}, 0, r"\{'compile': 1, 'load': 1\} True", "RuntimeWarning: "),
        ({"ON_COMPILE": "error"}, 1, "", "UnexpectedCompileError: rms_norm_forward_f32_no_weight"),
        ({"ON_COMPILE": "warn"}, 0, "", "RuntimeWarning: transformer_rtc compiles rms_norm_forward_f32"),
        ({"LOG": "2"}, 0, "", r'#include "norm/forward_\w+\.cu"(?s:.*)Used \d+ registers'),
        ({"FORCE_STATIC": "yes"}, 1, "", "SettingsError: TRANSFORMER_RTC_FORCE_STATIC is 'yes'; it takes 0, 1"),
        pytest.param({"FORCE_STATIC": "1"}, 0, r"\{'load': 1\} False", "", marks=needs_static),
    ],
    ids=str,
)
def test_a_setting_does_what_it_says(settings, code, stdout, stderr, tmp_path):
    done = run(CALL, **({"CACHE_DIR": str(tmp_path)} | settings))
    assert done.returncode == code and re.match(stdout, done.stdout), done.stderr
    assert re.search(stderr, done.stderr) if stderr else done.stderr == ""
    assert done.stderr.count("RuntimeWarning:") == stderr.count("RuntimeWarning:")
    kept = code == 0 and "CACHE_DIR" not in settings and "FORCE_STATIC" not in settings
    assert len(os.listdir(tmp_path)) == (2 if kept else 0)  # an entry, and the folder of locks


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


@needs_static
def test_forced_static_is_the_only_implementation():
    script = "import transformer_rtc as t\nwith t.using('static'): print(t.implementations(t.rms_norm))"
    assert output(script, FORCE_STATIC="1") == "['static']"
    assert output(script) == "['rtc', 'static', 'simulator']"


def test_nothing_selects_the_static_kernels_silently(tmp_path):
    # Without a compiler a call fails; it does not fall back.
    script = f"from transformer_rtc import compiler\ncompiler._installed_version = lambda name: None\n{CALL}"
    done = run(script, CACHE_DIR=str(tmp_path))
    assert done.returncode != 0 and re.search(r"CompilerNotFoundError: .*transformer_rtc\[cu12\]", done.stderr)


def test_a_choice_is_of_its_block_and_its_thread():
    seen = []

    def look():
        seen.append(select.IMPLEMENTATIONS[select.chosen.get()])

    with using("static"):
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        with using("rtc"):
            look()
        look()
    look()
    assert seen == ["static", "rtc", "rtc", "static", "rtc"]


# ---- Forks, spawned processes and threads ---------------------------------------------------------------------------

FORKS = {
    "after the import": ("", "for _ in range(2): in_child(lambda: right(t.rms_norm(host)))", ["True", "True"]),
    "after ours": ("t.rms_norm(host)", "in_child(lambda: t.rms_norm(host))", ["ForkError"]),
    "after torch": (
        "import torch; torch.zeros(1, device='cuda')", "in_child(lambda: t.rms_norm(host))", ["ForkError"]
    ),
    "with arrays of the GPU": (
        "import torch\nx = torch.ones(4, 64, device='cuda')\nstream = torch.cuda.default_stream().cuda_stream\n"
        "assert right(t.rms_norm(x).cpu())",
        "in_child(lambda: t.rms_norm(x))\nin_child(lambda: t.rms_norm(x, stream=stream))",
        ["ForkError", "ForkError"],
    ),
    # NVRTC 12.9 starts the driver itself where it finds one.
    "after a compile": (
        "from transformer_rtc import compiler\n"
        "compiler.compile_program('mine', 'extern \"C\" __global__ void mine() {}', {}, (), 90)",
        "in_child(lambda: right(t.rms_norm(host)))",
        ["True|ForkError"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("when", FORKS)
def test_a_forked_process_works_or_is_told_that_cuda_was_used(when, tmp_path):
    before, children, expected = FORKS[when]
    if "torch" in before:
        pytest.importorskip("torch")
    *told, parent = output(
        f"{CALLS}\n{before}\n{children}\nprint(right(t.rms_norm(host)))", **shared(tmp_path)
    ).splitlines()
    assert parent == "True" and told[1::2] == ["ended 0"] * len(expected)
    assert all(re.match(one, line) for one, line in zip(expected, told[::2], strict=True)), told


def test_spawned_processes_use_the_gpu_whatever_their_parent_did(tmp_path):
    assert output(CALLS + SPAWN, **shared(tmp_path)) == str([True] * 4)


@pytest.mark.alone
def test_64_threads_compile_and_load_each_of_16_keys_once(tmp_path):
    assert float(output(CALLS + threads(64, 16), CACHE_DIR=str(tmp_path))) > 1.5


# ---- Contexts -------------------------------------------------------------------------------------------------------

CONTEXT = """
import ctypes
def context():
    found = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0 and driver.cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value
"""
FRAMEWORKS = {
    "torch": ("torch.ones(4, 64, device='cuda')", "y.cpu().numpy()"),
    "cupy": ("cupy.ones((4, 64), 'float32')", "y.get()"),
    "jax": ("jax.numpy.ones((4, 64), 'float32')", "np.asarray(y)"),
}


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_context_is_shared_with_whoever_makes_it(framework, first, tmp_path):
    pytest.importorskip(framework)
    make, to_host = FRAMEWORKS[framework]
    script = f"""{CALLS}{CONTEXT}
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import {framework}
assert {first == "theirs"} or right(t.rms_norm(host))
x = {make}
before = context()
for _ in range(2):
    y = t.rms_norm(x)
    assert right({to_host}) and right(t.rms_norm(host))
print(context() == before)
"""
    assert output(script, **shared(tmp_path)) == "True"


def test_without_a_framework_no_context_stays_current(tmp_path):
    assert output(f"{CONTEXT}\n{CALL}\nprint(context())", **shared(tmp_path)).splitlines()[-1] == "None"


# ---- Ends of the interpreter ----------------------------------------------------------------------------------------

IN_FLIGHT = f"""{CALLS}
text = 'extern "C" __global__ void delay() {{ long long at = clock64(); while (clock64() - at < 2000000000ll) {{}} }}'
kernel = t.manager.compile(text, "delay", (), 0)
y = t.rms_norm(host)
def put(stream):
    kernel.launch_plain((1, 1, 1), (1, 1, 1), b"", stream)
"""
ENDS = {
    "own stream": "put(_native.own_stream(0))",
    "legacy stream": "put(0); buffer = _native.Buffer(0, 1 << 20)",
    "sys.exit": "put(0); sys.exit(0)",
    "threads": "threads = [threading.Thread(target=lambda: (put(0), sys.exit(0))) for _ in range(4)]\n"
    "for thread in threads: thread.start()",
    "a compile": "put(0)\nbegun = threading.Event()\n"
    "def compile():\n"
    "    number = 64\n"
    "    while True:\n"
    "        number += 1\n"
    "        begun.set()\n"
    "        t.layer_norm(np.ones((4, number), np.float32))\n"
    "threading.Thread(target=compile, daemon=True).start()\n"
    "begun.wait(60)",
    "torch": "import torch\nx = torch.ones(8192, 4096, device='cuda')\nput(torch.cuda.current_stream().cuda_stream)\n"
    "for _ in range(100): y = t.rms_norm(x)\ndx = t.rms_norm_backward(y, x, torch.ones(4096, device='cuda'))",
    "cupy": "import cupy\nx = cupy.ones((8192, 4096), 'float32')\nput(0)\nfor _ in range(100): y = t.rms_norm(x)",
    "jax": "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'\nimport jax\n"
    "x = jax.numpy.ones((8192, 4096), 'float32').block_until_ready()\nput(_native.own_stream(0))\n"
    "for _ in range(20): y = t.rms_norm(x)",
    "a graph": "import torch\nx = torch.ones(8192, 4096, device='cuda')\ngraph = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(graph): y = t.rms_norm(x)\nput(0)\nfor _ in range(100): graph.replay()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_quietly_with_work_in_flight(end, tmp_path):
    frameworks = [name for name in FRAMEWORKS if f"import {name}\n" in ENDS[end]]
    for framework in frameworks:
        pytest.importorskip(framework)
    done = run(IN_FLIGHT + ENDS[end], **({"CACHE_DIR": str(tmp_path)} if end == "a compile" else shared(tmp_path)))
    assert done.returncode == 0, done.stderr
    if frameworks:  # which may have something to say of themselves
        assert not re.search("Traceback|Exception|[Ee]rror|terminate|transformer_rtc", done.stderr), done.stderr
    else:
        assert done.stderr == ""
