from __future__ import annotations

import os
import re

import pytest
from processes import output, run

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


# ---- Forks and spawned processes ------------------------------------------------------------------------------------

# in_child(work): what a forked child prints, and how it ended; a child that hangs is killed.
IN_CHILD = """
import os, signal, sys, warnings
import numpy as np
import transformer_rtc as t
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
host = np.ones((4, 64), np.float32)
right = lambda y: bool(abs(np.asarray(y) - 1).max() < 1e-5)
def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            print(work(), flush=True)
        except t.TransformerRtcError as error:
            print(type(error).__name__, flush=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status))
"""


def test_a_process_forked_after_the_import_uses_the_gpu(tmp_path):
    script = f"{IN_CHILD}\nfor _ in range(2): in_child(lambda: right(t.rms_norm(host)))\nprint(right(t.rms_norm(host)))"
    assert output(script, CACHE_DIR=str(tmp_path)).splitlines() == ["True", "ended 0", "True", "ended 0", "True"]


@pytest.mark.parametrize("user", ["ours", "torch"])
def test_a_process_forked_after_cuda_was_used_is_told_so(user, tmp_path):
    if user == "torch":
        pytest.importorskip("torch")
    use = {"ours": "t.rms_norm(host)", "torch": "import torch; torch.zeros(1, device='cuda')"}[user]
    script = f"{IN_CHILD}\n{use}\nin_child(lambda: t.rms_norm(host))\nprint(right(t.rms_norm(host)))"
    assert output(script, CACHE_DIR=str(tmp_path)).splitlines() == ["ForkError", "ended 0", "True"]


def test_a_child_that_was_given_arrays_of_the_gpu_is_told_so(torch, tmp_path):
    script = f"""{IN_CHILD}
import torch
x = torch.ones(4, 64, device="cuda")
stream = torch.cuda.default_stream().cuda_stream
print(right(t.rms_norm(x).cpu()))
in_child(lambda: t.rms_norm(x))
in_child(lambda: t.rms_norm(x, stream=stream))
print(right(t.rms_norm(x).cpu()))
"""
    expected = ["True", "ForkError", "ended 0", "ForkError", "ended 0", "True"]
    assert output(script, CACHE_DIR=str(tmp_path)).splitlines() == expected


def test_a_child_of_a_process_that_has_only_compiled_works_or_is_told(tmp_path):
    # NVRTC 12.9 starts the driver itself where it finds one.
    script = f"""{IN_CHILD}
from transformer_rtc import compiler
compiler.compile_program("mine", 'extern "C" __global__ void mine() {{}}', {{}}, (), 90)
in_child(lambda: right(t.rms_norm(host)))
print(right(t.rms_norm(host)))
"""
    first, ended, parent = output(script, CACHE_DIR=str(tmp_path)).splitlines()
    assert first in ("True", "ForkError") and (ended, parent) == ("ended 0", "True")


def test_spawned_processes_use_the_gpu_whatever_their_parent_did(tmp_path):
    script = f"""{IN_CHILD}
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
t.rms_norm(host)
with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
    print([right(future.result()) for future in [pool.submit(t.rms_norm, host) for _ in range(4)]])
"""
    assert output(script, CACHE_DIR=str(tmp_path)) == str([True] * 4)


# ---- Threads --------------------------------------------------------------------------------------------------------


def test_64_threads_compile_and_load_each_of_16_keys_once(tmp_path):
    script = """
import threading, time
import numpy as np, transformer_rtc as t
spans, failures, start = [], [], threading.Barrier(64)
def told(event):
    if event.kind == "compile":
        spans.append((time.perf_counter() - event.milliseconds / 1e3, time.perf_counter()))
t.manager.on_event(told)
def work(i):
    try:
        start.wait(60)
        for j in range(16):
            y = t.rms_norm(np.full((2, 64 * (1 + (i + j) % 16)), 3, np.float32))
            assert abs(y - 1).max() < 1e-5
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
wall = max(end for _, end in spans) - min(begin for begin, _ in spans)
together = sum(end - begin for begin, end in spans) / wall
print(failures, dict(t.manager.counts) == {"compile": 16, "load": 16}, together > 1.5)
"""
    assert output(script, CACHE_DIR=str(tmp_path)) == "[] True True"


# ---- Contexts -------------------------------------------------------------------------------------------------------

CONTEXT = """
import ctypes
def context():
    found = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0 and driver.cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value
"""


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("framework", ["torch", "cupy", "jax"])
def test_a_context_is_shared_with_whoever_makes_it(framework, first, tmp_path):
    pytest.importorskip(framework)
    make = {
        "torch": "import torch; make = lambda: torch.ones(4, 64, device='cuda')",
        "cupy": "import cupy; make = lambda: cupy.ones((4, 64), 'float32')",
        "jax": "import jax; make = lambda: jax.numpy.ones((4, 64), 'float32')",
    }[framework]
    to_host = {"torch": "y.cpu().numpy()", "cupy": "y.get()", "jax": "np.asarray(y)"}[framework]
    ours = "y = t.rms_norm(np.ones((4, 64), np.float32))\nassert abs(y - 1).max() < 1e-5"
    script = f"""{CONTEXT}
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import numpy as np, transformer_rtc as t
{make}
{ours if first == "ours" else ""}
x = make()
before = context()
for _ in range(2):
    y = t.rms_norm(x)
    y = {to_host}
    assert abs(y - 1).max() < 1e-5
    {ours.replace(chr(10), chr(10) + "    ")}
print(context() == before)
"""
    assert output(script, CACHE_DIR=str(tmp_path)) == "True"


def test_without_a_framework_no_context_stays_current(tmp_path):
    script = f"{CONTEXT}\n{CALL}\nprint(context())"
    assert output(script, CACHE_DIR=str(tmp_path)).splitlines()[-1] == "None"


# ---- Ends of the interpreter ----------------------------------------------------------------------------------------

IN_FLIGHT = """
import sys, threading
import numpy as np, transformer_rtc as t
from transformer_rtc import _native
text = 'extern "C" __global__ void delay() { long long start = clock64(); while (clock64() - start < 2000000000ll) {} }'
kernel = t.manager.compile(text, "delay", (), 0)
host = np.ones((4, 64), np.float32)
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
    "jax": "import os\nos.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'\nimport jax\n"
    "x = jax.numpy.ones((8192, 4096), 'float32').block_until_ready()\nput(_native.own_stream(0))\n"
    "for _ in range(20): y = t.rms_norm(x)",
    "a graph": "import torch\nx = torch.ones(8192, 4096, device='cuda')\ngraph = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(graph): y = t.rms_norm(x)\nput(0)\nfor _ in range(100): graph.replay()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_quietly_with_work_in_flight(end, tmp_path):
    frameworks = [name for name in ("torch", "cupy", "jax") if f"import {name}\n" in ENDS[end]]
    for framework in frameworks:
        pytest.importorskip(framework)
    done = run(IN_FLIGHT + ENDS[end], CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    if frameworks:  # which may have something to say of themselves
        assert not re.search("Traceback|Exception|[Ee]rror|terminate|transformer_rtc", done.stderr), done.stderr
    else:
        assert done.stderr == ""
