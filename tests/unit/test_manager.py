# SPDX-License-Identifier: Apache-2.0
"""One compile and one load for many askers, and what settings, freezes and failures make of them."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import sys
import threading
import time
import types
import warnings

import pytest
from processes import output
from stubs import WAIT, Compiler, FakeKernel, in_threads, without_gpu

from transformer_rtc import SimulatedDevice, static
from transformer_rtc import device as devices
from transformer_rtc.cache import DiskCache
from transformer_rtc.compiler import REPORT
from transformer_rtc.device import Gpu
from transformer_rtc.errors import (
    CompileError,
    CompilerNotFoundError,
    DeviceNotFoundError,
    SettingsError,
    TransformerRtcError,
    UnexpectedCompileError,
)
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.settings import read
from transformer_rtc.spec import Field, Target, TextSpec

SETTINGS = read({"TRANSFORMER_RTC_CACHE_DIR": ""})
SPECS = FIRST, SECOND, THIRD = tuple(
    TextSpec(f'extern "C" __global__ void {name}() {{}}', name) for name in ("first", "second", "third")
)


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    without_gpu(monkeypatch)
    return Compiler()


@pytest.fixture
def make(compiler, tmp_path):
    """Return a maker of managers, as processes would have them: one folder and one compiler."""

    def make(identity="nvrtc 1", folder=str(tmp_path), **changes) -> KernelManager:
        options = dataclasses.replace(SETTINGS, **changes)
        return KernelManager(DiskCache(folder), compiler, lambda: identity, options)

    return make


def symbols(kernels) -> list[str]:
    return [kernel.symbol for kernel in kernels]


def refuse(*_):
    raise RuntimeError("out of memory, or of threads")


def test_cold_compiles_once_hot_does_nothing_warm_loads_and_what_is_damaged_is_replaced(make, compiler, tmp_path):
    manager = make()
    kernel = manager.get(FIRST, 0)
    assert all(manager.get(spec, 0) is kernel for spec in (FIRST, dataclasses.replace(FIRST)))
    assert compiler.calls == [("first", 90, ())] and manager.counts == {"compile": 1, "load": 1}
    assert FakeKernel.loaded == [("first", 0, b"\x7fELF first")]
    warm = make(on_compile="error")
    assert warm.get(FIRST, 0).image == b"\x7fELF first" and warm.counts == {"load": 1}
    (entry,) = tmp_path.glob("first.*")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert make().get(FIRST, 0).image == b"\x7fELF first" and len(compiler.calls) == 2
    make(on_compile="error").get(FIRST, 0)


def test_devices_of_one_architecture_share_a_compile_and_others_and_other_managers_do_not(make, compiler):
    manager = make(folder=None)
    kernels = [manager.get(FIRST, device) for device in (0, 1, 7)]
    assert [kernel.device for kernel in kernels] == [0, 1, 7]
    assert [call[1] for call in compiler.calls] == [90, 100] and manager.counts == {"compile": 2, "load": 3}
    make(folder=None).get(FIRST, 0)
    assert len(compiler.calls) == 3


# ---- Threads --------------------------------------------------------------------------------------------------------


def test_32_threads_that_ask_for_one_kernel_compile_and_load_it_once(make, compiler):
    compiler.during = lambda symbol: time.sleep(0.1)
    manager = make()
    results = in_threads(32, lambda i: manager.get(FIRST, 0))
    assert isinstance(results[0], FakeKernel) and all(result is results[0] for result in results)
    assert len(compiler.calls) == len(FakeKernel.loaded) == 1 and manager.counts == {"compile": 1, "load": 1}


def test_two_kernels_compile_at_the_same_time_and_those_of_one_call_are_told_of_in_its_thread(make, compiler):
    both, told, before = threading.Barrier(2), [], threading.active_count()
    compiler.during = lambda symbol: both.wait(WAIT)  # broken where one waits for the other's end
    manager = make(folder=None)
    assert symbols(in_threads(2, lambda i: manager.get(SPECS[i], 0))) == ["first", "second"]
    compiler.calls.clear()
    manager = make()
    manager.on_event(lambda event: told.append((event.kind, event.symbol, threading.get_ident())))
    kernels = manager.get_all((FIRST, SECOND), 0)
    assert [kernel.image for kernel in kernels] == [b"\x7fELF first", b"\x7fELF second"]
    assert sorted(compiler.symbols) == ["first", "second"] and threading.active_count() == before
    kinds = [("compile", "first"), ("load", "first"), ("compile", "second"), ("load", "second")]
    assert told == [(*kind, threading.get_ident()) for kind in kinds]
    assert manager.counts == {"compile": 2, "load": 2}


@pytest.mark.parametrize("start", [None, refuse], ids=["none is started", "none can be started"])
def test_a_call_does_without_threads_where_it_compiles_one_kernel_or_there_are_none(make, compiler, monkeypatch, start):
    if start is None:  # calling it would fail
        make().get(FIRST, 0)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        assert symbols(make().get_all((FIRST, SECOND), 0)) == compiler.symbols == ["first", "second"]


@pytest.mark.parametrize("failing", ["first", "second", "third"])
def test_a_kernel_of_a_call_that_does_not_compile_is_tried_once_and_not_remembered(make, compiler, failing):
    def fail(symbol):
        if symbol == failing:
            raise CompileError(symbol, (), "", "no", {})
        time.sleep(0.1)

    compiler.during = fail
    manager = make()
    with pytest.raises(CompileError, match=failing):
        manager.get_all(SPECS, 0)
    compiler.during = lambda symbol: None
    assert symbols(manager.get_all(SPECS, 0)) == ["first", "second", "third"]
    # Each once, told of once, and what failed twice.
    assert sorted(compiler.symbols) == sorted(["first", "second", "third", failing])
    assert manager.counts == {"compile": 3, "load": 3}


def test_a_cache_that_cannot_be_written_is_an_error_where_warnings_are_whichever_thread_meets_it(
    make, compiler, monkeypatch
):
    def put(cache, stem, *_):
        if stem.startswith("second"):
            warnings.warn("cannot be written", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(DiskCache, "put", put)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="cannot be written"):
            make().get_all((FIRST, SECOND), 0)
    assert len(compiler.calls) == 2


def test_a_compile_does_not_hold_up_a_kernel_that_is_there(make, compiler):
    manager = make()
    kernel = manager.get(FIRST, 0)
    compiling, go_on = threading.Event(), threading.Event()
    compiler.during = lambda symbol: (compiling.set(), go_on.wait(WAIT))
    thread = threading.Thread(target=manager.get, args=(SECOND, 0), daemon=True)
    thread.start()
    assert compiling.wait(WAIT)
    assert in_threads(1, lambda i: manager.get(FIRST, 0)) == [kernel]
    assert not manager.is_compiled(SECOND, 0)
    go_on.set()
    thread.join(WAIT)
    assert manager.is_compiled(SECOND, 0)


def test_what_another_process_compiles_meanwhile_is_waited_for(make, compiler):
    # Two managers on one folder are two processes: locks are of open files.
    managers = first, second = make(), make()
    waiting, wait, compiling = threading.Event(), second.cache._wait, threading.Event()
    second.cache._wait = lambda *arguments: (waiting.set(), wait(*arguments))[1]
    compiler.during = lambda symbol: (compiling.set(), waiting.wait(WAIT))
    images = in_threads(2, lambda i: (i == 0 or compiling.wait(WAIT), managers[i].get(FIRST, 0).image)[1])
    assert waiting.is_set() and len(compiler.calls) == 1 and images == [b"\x7fELF first"] * 2
    assert (first.counts, second.counts) == ({"compile": 1, "load": 1}, {"load": 1})


def test_a_failure_reaches_all_who_wait_and_is_not_remembered(make, compiler):
    def fail(symbol):
        time.sleep(0.3)  # until the others wait
        raise CompileError(symbol, (), "", "log", {})

    compiler.during = fail
    manager = make()
    results = in_threads(8, lambda i: manager.get(FIRST, 0))
    assert len(compiler.calls) == 1 and all(isinstance(result, CompileError) for result in results)
    assert not manager.is_compiled(FIRST, 0) and manager.counts == {}
    compiler.during = lambda symbol: None
    assert manager.get(FIRST, 0).symbol == "first" and len(compiler.calls) == 2


def test_a_failed_load_is_not_remembered_and_costs_no_other_compile(make, compiler, monkeypatch):
    manager = make(folder=None)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(Gpu, "load", refuse)
        manager.get(FIRST, 0)
    manager.get(FIRST, 0)
    assert len(compiler.calls) == 1


def test_a_callback_that_asks_for_the_kernel_it_is_told_of_is_an_error_and_no_deadlock(make):
    manager, failures = make(), []

    def callback(event):
        try:
            manager.get(FIRST, 0)
        except TransformerRtcError as error:
            failures.append(str(error))

    manager.on_event(callback)
    in_threads(1, lambda _: manager.get(FIRST, 0))
    assert failures and all("a callback asked" in failure for failure in failures)


# ---- What is allowed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "error", "told"),
    [
        ({"on_compile": "error"}, UnexpectedCompileError, "first for sm_90.*TRANSFORMER_RTC_ON_COMPILE=error"),
        ({"force_static": True}, SettingsError, "TRANSFORMER_RTC_FORCE_STATIC=1 forbids the compile of first"),
    ],
)
def test_a_setting_that_forbids_a_compile_is_named_with_the_kernel(make, compiler, setting, error, told):
    with pytest.raises(error, match=told):
        make(**setting).get(FIRST, 0)
    assert compiler.calls == []


def test_on_compile_warn_warns_in_the_callers_thread_for_compiles_and_for_nothing_else(make, compiler):
    threads = []
    compiler.during = lambda symbol: threads.append(threading.get_ident())
    with pytest.warns(RuntimeWarning, match="compiles (first|second) for sm_90") as caught:
        make(on_compile="warn").get_all((FIRST, SECOND), 0)
    assert len(caught) == 2 and threads == [threading.get_ident()] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(on_compile="warn").get(FIRST, 0)
        make(on_compile="allow").get(THIRD, 0)


def test_freeze_forbids_until_it_is_ended_and_names_the_key(make):
    manager = make()
    manager.get(FIRST, 0)
    stops = [manager.freeze(), manager.freeze()]
    manager.get(FIRST, 0)
    for stop in stops:
        with pytest.raises(UnexpectedCompileError, match=r"second for sm_90 .*freeze\(\)") as caught:
            manager.get(SECOND, 0)
        error = caught.value
        assert (error.symbol, error.target, error.manifest_line) == ("second", "sm_90", "")
        assert error.key == manager.key(SECOND, Target(90), "nvrtc 1") and error.key in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))
        stop()
        stop()  # ends its own freeze only
    assert manager.get(SECOND, 0).symbol == "second"


@pytest.mark.parametrize("sees", [False, True])
def test_a_frozen_miss_in_the_simulator_tells_of_the_gpu_and_of_no_warm_up(make, monkeypatch, sees):
    def current_device() -> int:
        if not sees:
            raise DeviceNotFoundError("there is none")
        return 0

    monkeypatch.setattr(devices, "_native", types.SimpleNamespace(current_device=current_device))
    manager = make(on_compile="error")
    with pytest.raises(UnexpectedCompileError) as caught:
        manager.compile(FIRST.text, "first", FIRST.fields, SimulatedDevice())
    miss, hint = str(caught.value).splitlines()
    assert miss.startswith("first for sm_90.fast is not in ") and json.loads(caught.value.manifest_line)
    assert hint.startswith("This process sees no GPU: start the container with --gpus all. ") == (not sees)
    assert hint.endswith("run it once without TRANSFORMER_RTC_ON_COMPILE=error to make this one")


def package(monkeypatch, image: bytes, kind: str) -> None:
    monkeypatch.setattr(static, "image", lambda family, architecture: static.StaticImage(image, kind))


def load_static(manager):
    return manager.get_static("norms", "entry", FIRST.params, 0, lambda: "")


def test_a_static_kernel_is_loaded_from_the_package(make, compiler, monkeypatch):
    package(monkeypatch, b"\x7fELF package", "cubin")
    manager, seen = make(force_static=True), []
    manager.on_event(seen.append)
    assert [load_static(manager).image for _ in range(2)] == [b"\x7fELF package"] * 2
    assert compiler.calls == [] and [(event.kind, event.origin) for event in seen] == [("load", "package")]


@pytest.mark.parametrize("on_compile", ["allow", "warn", "error"])
def test_the_drivers_compile_of_ptx_is_a_compile(make, monkeypatch, on_compile):
    package(monkeypatch, b".version\0", "ptx")
    manager = make(on_compile=on_compile)
    if on_compile == "error":
        with pytest.raises(UnexpectedCompileError, match="entry is PTX, which the driver must compile for sm_90"):
            load_static(manager)
    elif on_compile == "warn":
        with pytest.warns(RuntimeWarning, match="compiles entry for sm_90"):
            load_static(manager)
    else:
        load_static(manager)
    assert manager.counts == ({} if on_compile == "error" else {"load_ptx": 1})
    assert load_static(make(on_compile="error", force_static=True)).image == b".version\0"


# ---- Keys, events and logs ------------------------------------------------------------------------------------------


def test_an_entry_is_filed_under_what_really_compiled_it(make, compiler):
    compiler.really = "nvrtc 2"
    make(identity="nvrtc 1").get(FIRST, 0)
    make(identity="nvrtc 2", on_compile="error").get(FIRST, 0)
    with pytest.raises(UnexpectedCompileError):
        make(identity="nvrtc 1", on_compile="error").get(FIRST, 0)


def test_is_compiled_says_whether_get_would_compile(make, compiler):
    for folder in (make().cache.folder, None):
        manager = make(folder=folder)
        assert not manager.is_compiled(FIRST, 0)
        manager.get(FIRST, 0)
        assert manager.is_compiled(FIRST, 0) and manager.is_compiled(FIRST, 1) and not manager.is_compiled(FIRST, 7)
    assert make().is_compiled(FIRST, 0) and not make(identity="nvrtc 2").is_compiled(FIRST, 0)
    assert len(compiler.calls) == 2


def test_a_callers_text_gets_the_same_cache(make, compiler):
    def compiled_by(manager, body=""):
        text = f'extern "C" __global__ void mine(Params p) {{{body}}}'
        return manager.compile(text, "mine", [Field("n", "int32")], 0, ["-lineinfo"])

    assert compiled_by(make()).params.size == 4
    compiled_by(make(on_compile="error"))
    assert compiler.calls == [("mine", 90, ("-lineinfo",))]
    compiled_by(make(), ";")
    assert len(compiler.calls) == 2


def test_a_callback_that_was_added_twice_is_stopped_once_by_each(make):
    manager, seen = make(), []
    first, second = manager.on_event(seen.append), manager.on_event(seen.append)
    first()
    first()
    manager.get(FIRST, 0)
    assert len(seen) == 2  # a compile and a load
    second()
    manager.get(SECOND, 0)
    assert len(seen) == 2


def test_events_tell_what_happened_until_they_are_stopped(make):
    manager, seen, others = make(), [], []
    stop = manager.on_event(seen.append)
    manager.on_event(others.append)
    manager.get(FIRST, 0)
    size = len(b"\x7fELF first")
    assert [(e.kind, e.symbol, e.target, e.device, e.size, e.origin) for e in seen] == [
        ("compile", "first", Target(90), None, size, "compiler"),
        ("load", "first", Target(90), 0, size, "compiler"),
    ]
    assert all(event.milliseconds >= 0 for event in seen) and others == seen
    stop()
    manager.get(SECOND, 0)
    assert len(seen) == 2 and len(others) == 4
    warm = make()
    warm.on_event(seen.append)
    warm.get(FIRST, 0)
    assert (seen[-1].kind, seen[-1].origin) == ("load", "disk")


def test_a_cache_that_cannot_be_written_costs_one_warning_and_no_call(make, compiler):
    manager = make(folder="/dev/null/x")
    with pytest.warns(RuntimeWarning) as caught:
        assert symbols(manager.get(spec, 0) for spec in (FIRST, SECOND)) == ["first", "second"]
    assert len(caught) == 1 and len(compiler.calls) == 2


def test_a_log_is_what_was_asked_for_and_changes_no_key(make, compiler, capsys):
    make(log=2).get(FIRST, 0)
    text = capsys.readouterr().err
    assert FIRST.program in text and "\nlog\n" in text and compiler.calls[0][2] == (REPORT,)
    make(on_compile="error").get(FIRST, 0)
    make().get(SECOND, 0)
    assert capsys.readouterr() == ("", "")
    make(log=1).get(THIRD, 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "compile third sm_90" in lines[0] and "load third cuda:0" in lines[1]


def test_a_program_that_reads_records_gets_them_and_stderr_has_each_line_once(make, compiler, capsys, caplog):
    with caplog.at_level("INFO", "transformer_rtc"):
        make().get(FIRST, 0)
    assert [(one.name, one.levelname, one.getMessage().split()[:2]) for one in caplog.records] == [
        ("transformer_rtc", "INFO", ["compile", "first"]), ("transformer_rtc", "INFO", ["load", "first"]),
    ]  # fmt: skip
    assert compiler.calls[0][2] == () and capsys.readouterr() == ("", "")
    logger, handler = logging.getLogger("transformer_rtc"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        make(log=1).get(SECOND, 0)  # the handler is there, and no level asks for such records
        with caplog.at_level("DEBUG", "transformer_rtc"):
            make(log=1).get(THIRD, 0)
    finally:
        logger.removeHandler(handler)
    lines = capsys.readouterr().err.splitlines()
    assert sum("compile second" in line for line in lines) == sum("compile third" in line for line in lines) == 1
    assert compiler.calls[2][2] == (REPORT,) and THIRD.program in caplog.text


def test_no_process_imports_logging_for_want_of_a_reader():
    # numpy may have imported it.
    script = "import sys, numpy; had = 'logging' in sys.modules; import transformer_rtc; print(had)"
    assert output(script + "; assert had or 'logging' not in sys.modules") in ("True", "False")


def test_without_a_compiler_what_any_compiler_made_is_served(make, compiler, tmp_path):
    def no_compiler():
        raise CompilerNotFoundError("NVRTC is not installed")

    for version in ("nvrtc 12.10", "nvrtc 12.9"):
        compiler.really = version
        make(identity=version, folder=str(tmp_path / "image")).get(FIRST, 0)
    assert len(list((tmp_path / "image").glob("first.*"))) == 2
    cache = DiskCache(str(tmp_path / "own"), str(tmp_path / "image"))
    manager = KernelManager(cache, compiler, no_compiler, SETTINGS)
    assert manager.get(FIRST, 0).image == b"\x7fELF first" and manager.counts == {"load": 1}
    for other, device in ((SECOND, 0), (dataclasses.replace(FIRST, text=FIRST.text + " "), 0), (FIRST, 7)):
        with pytest.raises(CompilerNotFoundError):
            manager.get(other, device)
    assert len(compiler.calls) == 2
