# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import pickle
import shutil
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import CASES
from processes import output

from transformer_rtc import compiler, sources
from transformer_rtc.errors import ArgumentError, CompileError, CompilerNotFoundError
from transformer_rtc.spec import ARCHITECTURES

EMPTY = 'extern "C" __global__ void kernel() {}'


def compile_text(text=EMPTY, options=(), architecture=90, headers=None) -> compiler.Compiled:
    return compiler.compile_program("kernel", text, headers or {}, options, architecture)


def compile_spec(case) -> compiler.Compiled:
    spec, _ = case.specialise(ARCHITECTURES[90])
    return compiler.compile_program(spec.symbol, spec.program, sources.included(spec.program), (), 90)


def test_an_architecture_newer_than_nvrtc_gets_ptx_of_the_newest_one_that_runs_there():
    newest = max(compiler._open().nvrtc.architectures)
    compiled = compile_text(architecture=newest + 100)
    assert compiled.kind == "ptx"
    assert compiled.image.endswith(b"\0") and f".target sm_{newest}" in compiled.image.decode()
    assert compile_text(architecture=newest).kind == "cubin"


def test_an_architecture_older_than_nvrtc_knows_is_an_error():
    with pytest.raises(CompileError, match="sm_20"):
        compile_text(architecture=20)


def test_the_same_program_gives_the_same_bytes():
    assert compile_spec(CASES[0]).image == compile_spec(CASES[0]).image


def test_a_cubin_comes_with_its_log_and_its_ptx():
    compiled = compiler.compile_program("kernel", EMPTY, {}, (compiler.REPORT,), 90, keep_ptx=True)
    assert compiled.kind == "cubin" and compiled.image.startswith(b"\x7fELF")
    assert ".target sm_90" in compiled.ptx.decode() and compiled.ptx.endswith(b"\0")
    assert "registers" in compiled.log and "\0" not in compiled.log


def test_threads_that_compile_at_once_get_what_each_gets_alone():
    texts = [f'extern "C" __global__ void kernel(int* x) {{ x[{number}] = {number}; }}' for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(compile_text, texts))
    assert together == [compile_text(text) for text in texts]
    assert len({compiled.image for compiled in together}) == 4


def test_a_function_of_nvrtc_that_fails_is_named_with_its_result():
    with pytest.raises(RuntimeError, match="nvrtcGetPTXSize: NVRTC_ERROR_INVALID_"):
        compiler._open().nvrtc.call("nvrtcGetPTXSize", None, ctypes.c_size_t())


@pytest.fixture
def compile_error():
    source = 'extern "C" __global__ void broken() {\n  nonsense;\n}'
    with pytest.raises(CompileError) as caught:
        compiler.compile_program("broken", source, {}, ("-lineinfo",), 90)
    return caught.value


def test_a_compile_error_carries_all_that_a_report_needs(compile_error):
    error = compile_error
    assert error.symbol == "broken" and "nonsense" in error.log and "nonsense;" in error.source
    assert {"--gpu-architecture=sm_90", "-lineinfo", *compiler.OPTIONS} <= set(error.options)
    assert {"transformer_rtc", "python", "nvrtc", "cuda_bindings"} <= error.versions.keys()
    versions = (f"{name} {version}" for name, version in error.versions.items())
    for part in (error.symbol, error.log.strip(), *error.options, *versions, "   2 |   nonsense;"):
        assert part in str(error)


def test_a_compile_error_survives_pickling(compile_error):
    copy = pickle.loads(pickle.dumps(compile_error))
    assert type(copy) is CompileError and str(copy) == str(compile_error)
    assert vars(copy) == vars(compile_error)


MAJOR = compiler.bindings_major()


@pytest.fixture
def real() -> tuple[str, str]:
    """Return the path and the version of the NVRTC of this installation."""
    return compiler._library(MAJOR), compiler._open().version


@pytest.fixture
def not_opened(monkeypatch, tmp_path):
    """Have the compiler look for NVRTC anew, in a folder that a test fills."""
    monkeypatch.setattr(compiler, "_opened", None)
    for variable in ("LD_LIBRARY_PATH", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    compiler.compiler_identity.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    compiler.compiler_identity.cache_clear()


@pytest.mark.parametrize("call", [compiler.compiler_identity, compile_text], ids=["identity", "compile"])
def test_without_bindings_the_error_says_which_extra_to_install(call, not_opened):
    what = r"cuda-python is not installed.*transformer_rtc\[cu12\].*\[cu13\]"
    with pytest.raises(CompilerNotFoundError, match=what):
        call()


@pytest.mark.parametrize(
    ("bindings", "what"),
    [
        ("12.9.1", "NVRTC 12 is not installed"),
        ("13.9.1", "NVRTC 13 is not installed"),
        ("11.8.0", r"cuda-bindings 11\.8\.0 is installed"),
    ],
)
def test_without_nvrtc_of_the_bindings_the_error_says_which_extra_to_install(bindings, what, not_opened, tmp_path):
    (tmp_path / f"cuda_bindings-{bindings}.dist-info").mkdir()
    # A toolkit of the machine that runs this must not be found.
    not_opened.setattr(compiler.os.path, "exists", lambda path: False)
    with pytest.raises(CompilerNotFoundError, match=rf"{what}.*transformer_rtc\[cu12\]"):
        compiler.compiler_identity()


def test_the_identity_is_the_distributions_version_else_the_librarys_path_size_and_time(not_opened, tmp_path):
    (tmp_path / "cuda_bindings-12.9.1.dist-info").mkdir()
    library = tmp_path / "libnvrtc.so.12"
    library.write_bytes(b"12345")
    not_opened.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    identity = compiler.compiler_identity()
    assert str(library) in identity and " 5 " in identity and str(library.stat().st_mtime_ns) in identity
    (tmp_path / "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info").mkdir()
    compiler.compiler_identity.cache_clear()
    assert compiler.compiler_identity() == "nvidia_cuda_nvrtc_cu12 12.9.86"


def test_the_promised_identity_is_that_of_what_compiles():
    assert compile_text().compiler == compiler.compiler_identity()


def installed(folder: Path, major: str = MAJOR, version: str = "") -> Path:
    """Have a folder name the bindings and NVRTC as installed there; return where NVRTC's file would be."""
    (folder / f"cuda_bindings-{major}.9.1.dist-info").mkdir()
    (folder / f"{compiler._DISTRIBUTIONS[major]}-{version or major + '.9.86'}.dist-info").mkdir()
    library = folder / "nvidia" / "cuda_nvrtc" / "lib" / f"libnvrtc.so.{major}"
    library.parent.mkdir(parents=True)
    return library


def pathfinder(monkeypatch, find) -> None:
    """Have `find` be what cuda.pathfinder finds NVRTC with."""
    fake = types.ModuleType("cuda.pathfinder")
    fake.load_nvidia_dynamic_lib = find
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", fake)


@pytest.mark.parametrize("major", ["12", "13"])
def test_nvrtc_is_looked_for_in_its_wheel_then_in_the_environments_folders_then_by_pathfinder(
    major, not_opened, tmp_path
):
    of_wheel = installed(tmp_path, major)
    pathfinder(not_opened, lambda name: types.SimpleNamespace(abs_path=f"/found/lib{name}.so"))
    exists = compiler.os.path.exists
    # A toolkit of the machine that runs this must not be found.
    not_opened.setattr(compiler.os.path, "exists", lambda path: not path.startswith("/usr/local") and exists(path))
    assert compiler._library(major) == "/found/libnvrtc.so"
    (tmp_path / "lib").mkdir()
    of_environment = tmp_path / "lib" / of_wheel.name
    of_environment.write_bytes(b"")
    not_opened.setenv("CONDA_PREFIX", str(tmp_path))
    assert compiler._library(major) == str(of_environment)
    of_wheel.write_bytes(b"")
    assert compiler._library(major) == str(of_wheel)


def test_a_wheel_whose_files_are_elsewhere_is_found_by_pathfinder(tmp_path):
    installed(tmp_path)
    script = f"""
from transformer_rtc import compiler
compiler._libraries = lambda major: iter(())
compiled = compiler.compile_program("kernel", {EMPTY!r}, {{}}, (), 90)
print("cuda.bindings.nvrtc" in opened(), "cuda.pathfinder" in opened(), compiled.kind, compiled.compiler)
"""
    bindings, finder, kind, path, *_ = output(script, {"PYTHONPATH": str(tmp_path)}).split()
    assert (bindings, finder, kind) == ("False", "True", "cubin")
    assert Path(path).name.startswith("libnvrtc.so") and not path.startswith(str(tmp_path))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Path:
    """Return a library that calls itself NVRTC, and whose one function ends the process."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "stranger.cpp").write_text('extern "C" int nvrtcVersion(int*, int*) { __builtin_trap(); }')
    cxx = shutil.which("g++") or shutil.which("clang++")
    library = folder / f"libnvrtc.so.{MAJOR}"
    options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([cxx, *options, str(folder / "stranger.cpp")], check=True)
    return library


def test_the_identity_names_what_compiles_beside_another_library_of_nvrtcs_name(stranger):
    script = f"""
import ctypes
ctypes.CDLL({str(stranger)!r}, ctypes.RTLD_GLOBAL)
from transformer_rtc import compiler
compiled = compiler.compile_program("kernel", {EMPTY!r}, {{}}, (), 90)
print(compiled.kind, compiled.compiler == compiler.compiler_identity())
"""
    assert output(script) == "cubin True"


def test_a_library_that_is_none_or_lacks_functions_cannot_be_opened(stranger, not_opened, tmp_path):
    library = installed(tmp_path)
    library.write_bytes(b"12345")
    message = r"NVRTC cannot be opened: .*{}.*{}.*pip install 'transformer_rtc\[cu12\]'"
    with pytest.raises(CompilerNotFoundError, match=message.format(library.name, "")):
        compile_text()
    library.unlink()
    library.symlink_to(stranger)
    with pytest.raises(CompilerNotFoundError, match=message.format(library.name, "nvrtcGetNumSupportedArchs")):
        compile_text()


def test_where_pathfinder_finds_none_or_is_missing_the_error_says_so(not_opened, tmp_path):
    def find(name):
        raise RuntimeError(f"no {name} anywhere")

    installed(tmp_path)
    not_opened.setattr(compiler, "_libraries", lambda major: iter(()))
    pathfinder(not_opened, find)
    with pytest.raises(CompilerNotFoundError, match=r"NVRTC cannot be opened: no nvrtc anywhere\. pip install"):
        compile_text()
    not_opened.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(CompilerNotFoundError, match=r"NVRTC cannot be opened: .*cuda\.pathfinder.*pip install"):
        compile_text()


def test_an_installation_of_links_has_its_distributions_identity_if_that_is_of_the_librarys_version(
    real, not_opened, tmp_path
):
    path, version = real
    for number, claimed in enumerate((f"{version}.1", f"{MAJOR}.99.1")):
        site = tmp_path / str(number)
        site.mkdir()
        library = installed(site, version=claimed)
        library.symlink_to(path)
        not_opened.setattr(sys, "path", [str(site)])
        not_opened.setattr(compiler, "_opened", None)
        distribution = f"{compiler._DISTRIBUTIONS[MAJOR]} {claimed}"
        made = compile_text()
        assert made.compiler == (compiler.file_identity(path) if number else distribution)
        assert made.version == (f"NVRTC {version}" if number else "")


# NVRTC takes these with one dash or two, and after blanks.
FILE_OPTIONS = (
    *("-I/tmp", "-I", " -I/tmp", "--include-path=/tmp", "-include-path=/tmp", "--pre-include=x.h", "-include=x.h"),
    *("--pch", "-pch", "--create-pch=x", "--use-pch=x", "--pch-dir=/tmp", "-pch-dir=/tmp"),
)


@pytest.mark.parametrize("option", FILE_OPTIONS)
def test_an_option_that_names_files_is_refused(option):
    with pytest.raises(ArgumentError, match=f"the option {option} makes NVRTC read files"):
        compile_text(options=(option,))


@pytest.mark.parametrize("include", ['"stray.h"', '"./stray.h"', "<stray.h>", '"../folder/stray.h"'])
def test_a_file_of_the_current_folder_is_not_included(include, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder" / "stray.h").write_text("// no cache key would see it\n")
    with pytest.raises(CompileError) as caught:
        compile_text(f"#include {include}\n{EMPTY}")
    assert "could not open" in caught.value.log or "cannot open" in caught.value.log


@pytest.mark.parametrize("quotes", ['""', "<>"])
def test_a_file_of_an_absolute_path_is_refused(quotes, tmp_path):
    (tmp_path / "stray.h").write_text("// no cache key would see it\n")
    with pytest.raises(ArgumentError, match="includes a file by its path"):
        compile_text(f"#include {quotes[0]}{tmp_path}/stray.h{quotes[1]}\n{EMPTY}")


def test_a_file_in_the_current_folder_does_not_replace_a_header_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in sources.texts():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#error a stray file\n")
    compile_spec(CASES[0])


@pytest.mark.alone
def test_other_threads_run_while_nvrtc_compiles():
    case, seconds = next(case for case in CASES if case.backward), []

    def compile_one():
        start = time.perf_counter()
        compile_spec(case)
        seconds.append(time.perf_counter() - start)

    compile_one()  # opens NVRTC
    thread = threading.Thread(target=compile_one)
    longest, last = 0.0, time.perf_counter()  # start() returns when the thread lets go of the GIL
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    # With the GIL held, this thread would have stood still for all of it.
    assert longest < seconds[-1] / 2
