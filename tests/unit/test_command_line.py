# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from stubs import CUBIN, HOST, KEYS, Compiler

from transformer_rtc import cli, info, settings, warming
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import ArgumentError, CompilerNotFoundError
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.version import __version__

SCALE = """extern "C" __global__ void other() {}
extern "C" __global__ void scale(const Params p) {
  __shared__ float tile[64];
  tile[threadIdx.x] = ((float*)p.x)[threadIdx.x];
  __syncthreads();
  ((float*)p.x)[threadIdx.x] = tile[63 - threadIdx.x] * p.factor;
}
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def document(run) -> Callable[..., tuple[int, dict]]:
    """Return what runs a command for its exit code and its JSON."""

    def document(*arguments: str):
        code, told, _ = run(*arguments, "--json")
        return code, json.loads(told)

    return document


@pytest.fixture
def cache(monkeypatch, tmp_path) -> DiskCache:
    """Have the commands work on a folder with three entries."""
    made = DiskCache(str(tmp_path / "cache"))
    for number in range(3):
        about = {"symbol": f"kernel{number}", "target": "sm_90", "kind": "cubin", "compiler": "nvrtc 1"}
        made.put(f"kernel{number}.sm_90", KEYS[number], CUBIN, about)
    monkeypatch.setattr(cli, "manager", KernelManager(made))
    return made


def damage(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"?")


COMMANDS = [
    (), ("demo",), ("info",), ("warmup",), ("cache",), ("compile",),
    *(("cache", action) for action in ("list", "show", "verify", "prune", "clear", "pack", "unpack")),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_has_help_and_its_examples_are_commands(command, run):
    code, told, _ = run(*command, "--help")
    assert code == 0 and told.startswith("usage: transformer-rtc")
    examples = re.findall(r"^  (?:[A-Z_]+=\S+ )?transformer-rtc (.*)$", told, re.MULTILINE)
    assert examples or command == ("demo",)
    for example in examples:
        assert callable(cli._parser().parse_args(example.partition(" | ")[0].split()).run)


@pytest.mark.parametrize(
    "arguments",
    [(), ("nothing",), ("cache",), ("cache", "show"), ("compile", "x.cu"), ("warmup", "--hidden", "many"),
     ("cache", "prune", "--max-size", "big"), ("cache", "prune", "--unused-days", "-1"), ("info", "--what")],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_none_exit_with_2(arguments, run):
    code, told, error = run(*arguments)
    assert code == 2 and told == "" and "usage: transformer-rtc" in error
    code, told, nothing = run(*arguments, "--json")
    assert code == 2 and json.loads(told)["error"] in error and nothing == ""


@pytest.mark.parametrize(
    ("arguments", "usage", "told"),
    [
        (("warmup", "--hiden", "64"), "warmup", "unrecognized arguments: --hiden; did you mean --hidden?"),
        (("cache", "prune", "--max-sise=1"), "cache prune", "arguments: --max-sise=1; did you mean --max-size?"),
        (("info", "--xyz"), "info", "unrecognized arguments: --xyz\n"),
        (("info", "more"), "info", "unrecognized arguments: more\n"),
        (("--versio", "info"), "[-h]", "unrecognized arguments: --versio; did you mean --version?"),
        (
            ("compile", "x.cu", "--symbol", "x", "--architecture", "sm_90", "sm_86"),
            "compile",
            "unrecognized arguments: sm_86; --architecture takes one value\n",
        ),
        (
            ("compile", "--architecture", "sm_90", "sm_86", "x.cu", "--symbol", "x"),
            "compile",
            "unrecognized arguments: x.cu; --architecture takes one value\n",
        ),
        (
            ("warmup", "--dtype", "fp64"),
            "warmup",
            "argument --dtype: 'fp64'; did you mean fp16? It takes float32, float16, bfloat16, ",
        ),
        (("warmup", "--dtype", "x"), "warmup", ", bf16, fp16, fp32\n"),
    ],
    ids=str,
)
def test_misuse_has_the_commands_usage_and_what_was_meant(arguments, usage, told, run):
    code, _, error = run(*arguments)
    assert code == 2 and error.startswith(f"usage: transformer-rtc {usage} ") and told in error


def test_the_help_says_how_commands_exit_and_lists_the_variables(run):
    told = run("--help")[1]
    assert re.findall(r"^  (\d+) ", told.partition("it exits with:\n")[2], re.MULTILINE) == ["0", "1", "2", "130"]
    listed = re.findall(r"^  (TRANSFORMER_RTC_\w+) ", told, re.MULTILINE)
    assert listed == [variable.name for variable in settings.VARIABLES]


def test_the_version_and_the_two_names_of_the_command(run):
    assert run("--version") == (0, f"{__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "transformer_rtc", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '\n[project.scripts]\ntransformer-rtc = "transformer_rtc.cli:main"\n' in project


# ---- cache ----------------------------------------------------------------------------------------------------------


def test_list_and_show(cache, run, document):
    code, told, _ = run("cache", "list")
    assert code == 0 and told.count("cubin by nvrtc 1") == 3 and "3 entries" in told
    header, first, *_ = told.splitlines()
    assert header.split() == ["size", "last", "used", "entry", "what", "it", "is"]
    assert re.match(r" *\d+ bytes  \d{4}-\d\d-\d\d  kernel0\.sm_90\.\w+  cubin by nvrtc 1$", first)
    damage(cache.path("kernel1.sm_90", KEYS[1]))
    entries = document("cache", "list")[1]["entries"]
    found = [(entry["symbol"], entry["damaged"]) for entry in entries]
    assert found == [("kernel0", False), (None, True), ("kernel2", False)]
    assert "damaged" in run("cache", "list")[1]
    code, told, _ = run("cache", "show", "kernel2")
    assert code == 0 and re.search(r"^key +" + KEYS[2], told, re.MULTILINE) and "kernel0" not in told
    assert "starts with 'absent'" in refused(run, "cache", "show", "absent")


def test_list_tells_the_version_of_a_compiler_that_is_a_file(cache, run):
    about = {"kind": "module", "compiler": "/usr/bin/g++ 1000 17", "version": "g++ 12.2.0"}
    cache.put("simulated.sm_90.fast", KEYS[3], HOST, about)
    assert "  module by g++ 12.2.0\n" in run("cache", "list")[1]
    assert re.search(r"^version +g\+\+ 12\.2\.0$", run("cache", "show", "simulated")[1], re.MULTILINE)


def test_list_has_the_read_only_folder_too(cache, run, document, monkeypatch, tmp_path):
    image = tmp_path / "image"
    DiskCache(str(image)).put("shipped.sm_90", KEYS[3], CUBIN, {"symbol": "shipped"})
    assert document("cache", "list")[1]["read_only"] is None
    monkeypatch.setattr(cli, "manager", KernelManager(DiskCache(cache.folder, str(image))))
    code, told = document("cache", "list")
    assert code == 0 and len(told["entries"]) == 3 and told["read_only"]["folder"] == str(image)
    assert [entry["symbol"] for entry in told["read_only"]["entries"]] == ["shipped"] and told["read_only"]["bytes"]
    last = run("cache", "list")[1].splitlines()[-1]
    assert re.fullmatch(rf"1 entries, \d+ bytes in {image}, which is only read", last)
    os.chmod(image, 0o777)
    code, told, _ = run("cache", "list")
    assert code == 0 and "3 entries" in told and "only read and is not used: others may write to it" in told
    monkeypatch.setattr(cli, "manager", KernelManager(DiskCache(cache.folder, str(tmp_path / "absent"))))
    assert "only read and is not used: it is not there" in run("cache", "list")[1]


def test_verify_finds_damage_and_prune_removes_it(cache, run, document):
    assert run("cache", "verify")[:2] == (0, "3 entries, 0 damaged\n")
    damage(cache.path("kernel1.sm_90", KEYS[1]))
    code, told = document("cache", "verify")
    assert code == 1 and [name.partition(".")[0] for name in told["damaged"]] == ["kernel1"]
    code, told, _ = run("cache", "prune")
    assert code == 0 and told.startswith("removed kernel1.sm_90.") and "2 entries" in told
    assert run("cache", "verify")[0] == 0


@pytest.mark.parametrize("action", [["verify"], ["list"], ["pack", "kernels.pack"]], ids=str)
def test_a_folder_that_is_not_there_is_refused(action, cache, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = str(tmp_path / "absent")
    assert f"there is no folder {absent}" in refused(run, "cache", *action, "--folder", absent)
    assert not Path("kernels.pack").exists()


@pytest.mark.parametrize("action", ["list", "verify", "prune", "clear"])
def test_a_folder_that_is_not_used_is_left_as_it_is(action, cache, run):
    os.chmod(cache.folder, 0o775)
    assert "others may write to it" in refused(run, "cache", action)
    os.chmod(cache.folder, 0o755)
    assert run("cache", "verify")[:2] == (0, "3 entries, 0 damaged\n")


@pytest.mark.parametrize("action", ["verify", "prune"])
def test_what_killed_writers_left_is_deleted(action, cache, document):
    half = Path(f"{cache.path('kernel', KEYS[0])}.1.0123abcd.tmp")
    half.write_bytes(b"half")
    code, told = document("cache", action)
    assert code == 0 and told["removed"] == [half.name] and told["entries"] == 3 and not half.exists()


def test_prune_by_size_and_age_and_clear(cache, run, document):
    os.utime(cache.path("kernel0.sm_90", KEYS[0]), (0, 0))
    code, told = document("cache", "prune", "--unused-days", "30")
    assert code == 0 and [name.partition(".")[0] for name in told["removed"]] == ["kernel0"]
    assert document("cache", "prune", "--max-size", "1")[1]["entries"] == 0
    cache.put("kernel0.sm_90", KEYS[0], CUBIN, {})
    assert "1 removed; 0 entries, 0 bytes stay" in run("cache", "clear")[1]


def test_pack_and_unpack(cache, run, document, tmp_path):
    path, other = str(tmp_path / "pack"), str(tmp_path / "other")
    damage(cache.path("kernel1.sm_90", KEYS[1]))
    code, told, _ = run("cache", "pack", path)
    assert code == 0 and f"2 entries in {path}" in told
    assert re.search(r"^left out kernel1\S+: damaged$", told, re.MULTILINE)
    cache.put("simulated.sm_90.fast", KEYS[3], HOST, {"kind": "module"})
    assert re.search(r"^left out simulated\S+: a module of the simulator$", run("cache", "pack", path)[1], re.MULTILINE)
    code, told = document("cache", "unpack", path, "--folder", other)
    assert code == 0 and len(told["added"]) == 2
    assert DiskCache(other).get("kernel0.sm_90", KEYS[0]) == CUBIN
    damage(path)
    assert "damaged" in refused(run, "cache", "unpack", path, "--folder", other)
    absent = str(tmp_path / "absent")
    assert f"{absent} cannot be read: " in refused(run, "cache", "unpack", absent, "--folder", other, code=2)


def test_who_reads_no_further_gets_no_traceback(cache):
    script = "import sys; from transformer_rtc.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "cache", "list", "--folder", cache.folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.close()
        assert running.stderr.read() == b"" and running.wait(60) == 1


# ---- warmup ---------------------------------------------------------------------------------------------------------

WARM = ("rms_norm", "--architecture", "sm_90", "--dtype", "float16", "--hidden", "64")


@pytest.fixture
def warm(monkeypatch, run, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Return what runs a warm-up with a compiler that only counts."""

    def warm(
        *arguments: str, folder: str | None = str(tmp_path), identity=lambda: "nvrtc 1", options=settings.settings
    ):
        manager = KernelManager(DiskCache(folder), Compiler(), identity, options)
        for module in (cli, warming):
            monkeypatch.setattr(module, "manager", manager)
        return run("warmup", *arguments, "--quiet")

    return warm


def test_a_warm_up_from_the_command_line(warm):
    arguments = (*WARM, "128", "--whole-rows", "--argument", "weight=float32", "return_rstd=true", "--json")
    code, told, _ = warm(*arguments)
    found = json.loads(told)
    assert (code, found["compiled"], found["cached"], found["failed"], found["kept"]) == (0, 2, 0, 0, True)
    assert [record["symbol"].partition("_t")[0] for record in found["records"]] == [
        "rms_norm_forward_f16_weight_f32_rstd_h64", "rms_norm_forward_f16_weight_f32_rstd_h128",
    ]  # fmt: skip
    assert json.loads(warm(*arguments)[1])["cached"] == 2


def test_a_warm_up_of_kernels_of_every_length_needs_no_hidden_size(warm):
    code, told, _ = warm("gelu", "--architecture", "sm_90", "--dtype", "bf16", "--whole-rows")
    assert code == 0 and told.endswith("1 compiled, 0 cached, 0 missing, 0 failed\n")


def test_a_warm_up_that_keeps_nothing_or_fails_exits_with_1_and_says_why(warm):
    def missing():
        raise CompilerNotFoundError("there is no NVRTC")

    code, told, error = warm(*WARM, folder=None)
    assert code == 1 and "compiled" in told and "could not be kept" in error
    code, told, nothing = warm(*WARM, "--json", folder=None)
    assert code == 1 and json.loads(told)["kept"] is False and "could not be kept" in json.loads(told)["error"]
    assert nothing == ""
    code, told, _ = warm(*WARM, identity=missing)
    assert code == 1 and "failed" in told and "there is no NVRTC" in told


def test_a_warm_up_that_may_not_compile_lists_what_is_missing_in_a_short_line_each(warm):
    warm(*WARM, "--whole-rows")
    frozen = settings.read({"TRANSFORMER_RTC_ON_COMPILE": "error"})
    code, told, error = warm(*WARM, options=frozen)
    _, *lines, summary = told.splitlines()
    assert (code, error, summary) == (1, "", "0 compiled, 1 cached, 1 missing, 0 failed")
    assert re.fullmatch(r"missing +[\d.]+ ms  sm_90   rms_norm_forward_\w+: it is in no cache", lines[1])
    told = warm(*WARM, identity=lambda: "nvrtc 2", options=frozen)[1]
    assert "_h64: it was compiled there by nvrtc 1, and this compiler is nvrtc 2\n" in re.sub(r"_t\w+", "", told)
    found = json.loads(warm(*WARM, "--json", options=frozen)[1])
    assert [record["status"] for record in found["records"]] == ["cached", "missing"] and found["missing"] == 1


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_data_types_are_those_of_the_command_line(short, name, warm):
    command = ("rms_norm", "--architecture", "sm_90", "--hidden", "64", "--dtype")
    found = json.loads(warm(*command, short, "--argument", f"weight={short}", "--json")[1])
    assert found["compiled"] == 2
    assert json.loads(warm(*command, name, "--argument", f"weight={name}", "--json")[1])["cached"] == 2
    with pytest.raises(ArgumentError, match=f"dtypes has '{short}'"):
        warming.warmup("rms_norm", short, 64, architectures="sm_90")


@pytest.mark.parametrize("has_bar", [True, False])
def test_a_warm_up_has_a_table_with_a_header_and_prints_nothing_twice(has_bar, warm, run, monkeypatch, tmp_path):
    warm(*WARM)  # which sets the manager
    bar = types.SimpleNamespace(update=lambda: None, close=lambda: None)
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=lambda **_: bar) if has_bar else None)
    code, told, error = run("warmup", *WARM)
    lines = told.splitlines()
    assert code == 0 and lines[0].split() == ["status", "time", "for", "kernel"] and error == ""
    assert all(re.match(r"cached +[\d.]+ ms  sm_90   rms_norm_forward_f16_", line) for line in lines[1:-1])
    assert len(lines) == len({*lines}) == 4 and lines[-1] == "0 compiled, 2 cached, 0 missing, 0 failed"


# ---- compile --------------------------------------------------------------------------------------------------------


def test_a_kernel_of_ones_own_is_compiled_and_described(run, tmp_path):
    path, output = tmp_path / "scale.cu", tmp_path / "scale.cubin"
    path.write_text(SCALE)
    arguments = ("compile", str(path), "--symbol", "scale", "--field", "x:pointer", "factor:float32")
    code, told, _ = run(*arguments, "--architecture", "sm_90", "--output", str(output), "--json")
    found = json.loads(told)
    assert code == 0 and found["static_shared_memory"] == 256 and 4 <= found["registers"] <= 32
    assert (found["symbol"], found["architecture"], found["kind"]) == ("scale", "sm_90", "cubin")
    assert output.read_bytes().startswith(b"\x7fELF") and found["bytes"] == output.stat().st_size
    code, told, _ = run(*arguments, "--architecture", "sm_200")
    assert code == 0 and re.search(r"^kind +ptx$", told, re.MULTILINE) and "registers" not in told
    assert re.search(r"^size +\d+ bytes$", told, re.MULTILINE)
    assert re.search(r"^compile time +[\d.]+ ms$", told, re.MULTILINE)


# ---- Refusals -------------------------------------------------------------------------------------------------------

COMPILE = ("compile", "scale.cu", "--architecture", "sm_90", "--symbol", "scale")


def refused(run: Run, *arguments: str, code: int = 1) -> str:
    """Return what a command says that exits with this; with --json it says the same in a document, and nothing else."""
    exited, told, error = run(*arguments)
    assert (exited, told) == (code, "") and error.startswith("transformer-rtc: ")
    exited, told, nothing = run(*arguments, "--json")
    found = json.loads(told)
    assert (exited, nothing) == (code, "") and found.keys() == {"error", "type"}
    assert re.sub(r"0x\w+", "", f"transformer-rtc: {found['error']}\n") == re.sub(r"0x\w+", "", error)
    return error


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        *(
            (("cache", *action), 1, "TRANSFORMER_RTC_CACHE_DIR is empty")
            for action in (["list"], ["pack", "x"], ["prune"])
        ),
        (("warmup",), 2, "there is nothing to warm up"),
        (("warmup", "norm"), 2, "operator has 'norm'"),
        (("warmup", "layernorm"), 2, "operator has 'layernorm'; did you mean layer_norm? It takes "),
        (("tune", "rms_nrm"), 2, "; did you mean rms_norm? It takes "),
        (("tune", "gelu", "--dtype", "bf16"), 2, "gelu needs --dtype and --hidden, such as"),
        (
            ("warmup", *WARM, "--argument", "return_rtsd=true"),
            2,
            "--argument has return_rtsd; did you mean return_rstd? It takes ",
        ),
        (("warmup", "rms_norm", "--dtype", "bf16"), 2, "rms_norm needs --dtype and --hidden, such as"),
        (("warmup", "--dtype", "bf16"), 2, "--dtype, --hidden and arguments are those of operators"),
        (("warmup", *WARM, "--architecture", "sm_1"), 2, "--architecture has 'sm_1'; it takes sm_80"),
        (("warmup", *WARM, "--threads", "0"), 2, "--threads is 0; it takes"),
        (("compile", "dtypes.cu", *COMPILE[2:], "-I", "dtypes"), 2, "/dtypes', which is no folder"),
        (("warmup", *WARM, "--argument", "x"), 2, "it takes name=value"),
        (("warmup", *WARM, "--argument", "threads=2"), 2, "--argument has threads"),
        (("warmup", *WARM, "--argument", "weight=big"), 2, "weight is 'big'"),
        (("warmup", "--manifest", "/nonexistent"), 2, "cannot be read"),
        ((*COMPILE, "--symbol", "absent"), 1, 'scale.cu has no extern "C" __global__ absent; its entries are: '),
        (("compile", "broken.cu", *COMPILE[2:]), 1, "broken.cu: NVRTC could not compile scale\nbroken.cu(1): error"),
        ((*COMPILE, "--architecture", "90"), 2, "--architecture is '90'; it takes one such as sm_90"),
        ((*COMPILE, "--architecture", "sm_75"), 2, "--architecture is 'sm_75'; it takes sm_80 or newer"),
        ((*COMPILE, "--field=x"), 2, "scale.cu: field x has the type ''"),
        ((*COMPILE, "--option=-I/usr/include"), 2, "scale.cu: scale: the option -I/usr/include"),
        ((*COMPILE, "--output=/nonexistent/x"), 1, "/nonexistent/x cannot be written"),
        (
            ("compile", "empty.cu", *COMPILE[2:]),
            1,
            'empty.cu has no extern "C" __global__ scale; its entries are: none',
        ),
        (("compile", "/nonexistent/x.cu", *COMPILE[2:]), 2, "/nonexistent/x.cu cannot be read"),
    ],
)
def test_what_cannot_be_done_exits_with_a_code_and_says_why(arguments, code, told, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "manager", KernelManager(DiskCache(None)))
    Path("scale.cu").write_text('extern "C" __global__ void scale() {}')
    Path("broken.cu").write_text('extern "C" __global__ void scale() { error }')
    Path("empty.cu").write_text("")
    Path("dtypes.cu").write_text('#include "dtypes.h"')  # names of files are no names of arguments
    assert told in refused(run, *arguments, code=code)


@pytest.mark.parametrize(
    ("fields", "given"), [((), "given: none"), (("--field", "y:pointer", "n:int64"), "given: y:pointer, n:int64")]
)
def test_a_field_that_params_lacks_is_hinted_at(fields, given, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scale.cu").write_text('extern "C" __global__ void scale(const Params p) { ((float*)p.x)[0] = 1; }')
    error = refused(run, *COMPILE, *fields)
    assert '"/nonexistent' not in error and "scale.cu(1): error" in error
    assert error.endswith(f"Params has the fields that --field names, such as --field x:pointer n:int64; {given}\n")


def test_without_a_gpu_a_compile_asks_for_the_architecture(run, tmp_path, monkeypatch, without_driver):
    monkeypatch.chdir(tmp_path)
    Path("scale.cu").write_text('extern "C" __global__ void scale() {}')
    assert "--architecture names another one, such as sm_90" in refused(run, "compile", "scale.cu", "--symbol", "scale")


def test_who_interrupts_a_command_gets_130(run, document, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "gather", interrupted)
    assert run("info") == (130, "", "")
    assert document("info") == (130, {"error": "interrupted", "type": "KeyboardInterrupt"})
