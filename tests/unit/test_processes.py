"""Forks, spawned processes, threads, devices and ends of the interpreter: with NVRTC, on the fake driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# in_child(work): what a forked child prints, and how it ended; a child that hangs is killed.
IN_CHILD = """
import io, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which are what is tested
def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            print(work(), flush=True)
        except t.TransformerRtcError as error:
            print(type(error).__name__, error, flush=True)
        finally:
            # As multiprocessing's children end, with the end of all objects before it.
            globals().clear()
            __import__("gc").collect()
            __import__("os")._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status))
host = np.ones((4, 64), np.float32)
"""
# A compiler that takes no time, for what is not about compiles.
QUICK = """
from transformer_rtc.compiler import Compiled
t.manager._compile_program = lambda symbol, *_: Compiled(b"\\x7fELF" + symbol.encode(), "cubin", "", "quick")
"""


def test_a_child_forked_after_the_import_works(fake_driver):
    script = f"{IN_CHILD}\nin_child(lambda: t.rms_norm(host).shape)\nprint(t.rms_norm(host).shape)"
    assert fake_driver(script) == ["(4, 64)", "ended 0", "(4, 64)"]


@pytest.mark.parametrize(
    "call",
    [
        "t.rms_norm(host)",
        "t.rms_norm(x)",
        "kernel.launch_plain((1, 1, 1), (32, 1, 1), b'')",
        "t.manager.compile('extern \"C\" __global__ void other() {}', 'other', (), 0)",
        "t.device_limits(0)",
        "_native.Buffer(0, 4)",
    ],
)
def test_a_child_of_a_process_that_uses_cuda_is_told_so_at_once(call, fake_driver):
    # The fake driver kills whoever calls it after a fork, also to free, to unload or to destroy.
    script = f"""{IN_CHILD}
x = array(4, 64, made_on=1)
t.rms_norm(x)
kernel = t.manager.compile('extern "C" __global__ void mine() {{}}', "mine", (), 0)
in_child(lambda: {call})
print(t.rms_norm(host).shape, os.getpid())
"""
    told, ended, after = fake_driver(script)
    parent = after.split()[-1]
    assert (
        told.startswith("ForkError process ") and f"was forked from process {parent} after that had used CUDA" in told
    )
    assert "by spawn or forkserver, or fork before the first call on a GPU and the first compile" in told
    assert ended == "ended 0" and after.startswith("(4, 64)")


def test_a_child_whose_parent_used_cuda_by_another_library_is_told_so_too(fake_driver):
    script = f"{IN_CHILD}\ndriver.cuInit(0)\nin_child(lambda: t.rms_norm(host))\nprint(t.rms_norm(host).shape)"
    told, ended, after = fake_driver(script)
    assert told.startswith("ForkError ") and "after that had used CUDA" in told
    assert (ended, after) == ("ended 0", "(4, 64)")


def test_a_child_has_none_of_its_parents_locks_and_unfinished_work(fake_driver):
    # Another thread is in the middle of a compile, of a load, and in the table's lock, when the process is forked.
    script = f"""{IN_CHILD}{QUICK}
from transformer_rtc.manager import KernelManager
from transformer_rtc.cache import DiskCache
arrived, go_on = threading.Semaphore(0), threading.Event()
slow = threading.get_ident()
def compile_program(symbol, *_):
    if os.getpid() == parent:
        arrived.release()
        go_on.wait(60)
    return Compiled(b"\\x7fELF", "cubin", "", "quick")
parent, manager = os.getpid(), KernelManager(DiskCache(None), compile_program, lambda: "quick")
spec = t.TextSpec('extern "C" __global__ void mine() {{}}', "mine")
def hold():
    with manager._kernels._lock, manager._images._lock:
        arrived.release()
        go_on.wait(60)
compiling = threading.Thread(target=manager.image, args=(spec, 90))
compiling.start()
arrived.acquire()
holding = threading.Thread(target=hold)
holding.start()
arrived.acquire()
in_child(lambda: (manager.image(spec, 90).kind, dict(manager.counts)))
go_on.set()
compiling.join()
holding.join()
print(dict(manager.counts))
"""
    assert fake_driver(script) == ["('cubin', {'compile': 1})", "ended 0", "{'compile': 1}"]


def test_children_forked_while_nvrtc_compiles_compile(fake_driver):
    script = f"""{IN_CHILD}
from transformer_rtc import compiler
text = 'extern "C" __global__ void mine(float* x) {{ *x += %d; }}'
compile_program = lambda number: compiler.compile_program("mine", text % number, {{}}, (), 90).kind
over = threading.Event()
def work(first):
    number = first
    while not over.is_set():
        compile_program(number := number + 1)
threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(3)]
for thread in threads: thread.start()
for i in range(10): in_child(lambda: compile_program(i))
over.set()
for thread in threads: thread.join()
"""
    assert fake_driver(script) == ["cubin", "ended 0"] * 10


def test_spawned_processes_work_whatever_their_parent_did(fake_driver):
    script = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    host = np.ones((4, 64), np.float32)
    t.rms_norm(host)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        print([future.result().shape for future in [pool.submit(t.rms_norm, host) for _ in range(4)]])
    """
    assert fake_driver(script) == [str([(4, 64)] * 4)]


# ---- Threads --------------------------------------------------------------------------------------------------------


def test_64_threads_compile_and_load_each_of_16_keys_once_and_not_one_after_the_other(fake_driver, tmp_path):
    script = """
    import time
    spans = []
    def told(event):
        if event.kind == "compile":
            now = time.perf_counter()
            spans.append((now - event.milliseconds / 1e3, now))
    t.manager.on_event(told)
    start, failures = threading.Barrier(64), []
    def work(i):
        try:
            start.wait(60)
            for j in range(16):
                t.rms_norm(np.ones((2, 64 * (1 + (i + j) % 16)), np.float32))
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    at = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    together = most = 0
    for _, step in at:
        together += step
        most = max(most, together)
    print(failures, dict(t.manager.counts) == {"compile": 16, "load": 16}, most > 1)
    """
    assert fake_driver(script, TRANSFORMER_RTC_CACHE_DIR=str(tmp_path)) == ["[] True True"]


# ---- Devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["rtc", "static"])
def test_each_device_has_one_load_and_the_callers_stays_current(implementation, fake_driver):
    # The fake driver refuses a launch whose kernel is of another context than the current one.
    script = f"""
    on = lambda device: t.DeviceArray(_native.Buffer(device, 1024), (4, 64), 32 | 2 << 8, 1)
    driver.fake_push(1)
    loads = []
    t.manager.on_event(lambda event: loads.append(event.device) if event.kind == "load" else None)
    with t.using("{implementation}"):
        for device in (0, 1, 0, 1):
            y = t.rms_norm(on(device))
            print(y.device, _native.current_device(), driver.fake_depth())
    print(loads)
    """
    assert fake_driver(script) == ["0 1 1", "1 1 1", "0 1 1", "1 1 1", "[0, 1]"]


def test_a_stream_of_another_device_is_refused_before_it_is_touched(fake_driver):
    script = """
    foreign = stream_of(1, 0)
    begin(foreign)
    try:
        t.rms_norm(array(4, 64), stream=foreign)
    except t.ArgumentError as error:
        print(error)
    print(end(foreign))
    """
    assert fake_driver(script) == ["rms_norm: stream belongs to another device or context than cuda:0", "b''"]


# ---- Ends of the interpreter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        # The main thread ends while NVRTC compiles in a thread that nobody waits for.
        "threading.Thread(target=compile, daemon=True).start(); begun.wait(60)",
        "threading.Thread(target=compile, daemon=True).start(); begun.wait(60); sys.exit(0)",
        # Threads that end, or end themselves, with what they made.
        "threads = [threading.Thread(target=lambda: (t.rms_norm(host), sys.exit(0))) for _ in range(4)]\n"
        "for thread in threads: thread.start()",
        # What is made at the end: the interpreter's own, and of modules that are gone.
        "import atexit; atexit.register(lambda: t.rms_norm(np.ones((4, 96), np.float32)))",
        "class Late:\n    def __del__(self, kept=(t.rms_norm(host), x, y)): pass\nlate = Late(); late.itself = late",
    ],
    ids=["daemon", "sys.exit", "threads", "atexit", "__del__"],
)
def test_an_interpreter_ends_quietly(end, fake_driver, tmp_path):
    script = f"""
begun, host, x = threading.Event(), np.ones((4, 64), np.float32), array(4, 64, made_on=1)
y = t.rms_norm(x)
kernel = t.manager.compile('extern "C" __global__ void mine() {{}}', "mine", (), 0)
def compile():
    number = 0
    while True:
        number += 1
        begun.set()
        t.layer_norm(np.ones((4, 64 + number), np.float32))
{end}
"""
    fake_driver(script, TRANSFORMER_RTC_CACHE_DIR=str(tmp_path))


# ---- A Python without the GIL ---------------------------------------------------------------------------------------


def test_a_python_whose_gil_is_off_is_told_at_import_that_it_is_needed():
    script = "import sys\nsys._is_gil_enabled = lambda: {}\n{}"
    # A free-threaded Python warns where it turns the GIL on, unless it is asked to.
    environment = os.environ | {"PYTHON_GIL": "1"}

    def run(enabled: bool, then: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script.format(enabled, then)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = run(False, "import transformer_rtc")
    assert done.returncode == 1 and "SettingsError: the GIL is off (PYTHON_GIL=0 or -X gil=0)" in done.stderr
    done = run(True, "import transformer_rtc")
    assert (done.returncode, done.stderr) == (0, "")
    # Another thread that waits for this import gets the module as it was left.
    left = "print([name for name in sys.modules if name.startswith('transformer_rtc.')])"
    done = run(False, f"try: import transformer_rtc\nexcept ValueError: {left}")
    assert done.stdout.strip() == "['transformer_rtc._native', 'transformer_rtc.errors']", done.stderr
