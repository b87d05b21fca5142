"""The command line: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from processes import run_python

from transformer_rtc import cli, compiler, demo, info, warming
from transformer_rtc.cache import DiskCache, digest
from transformer_rtc.errors import CompilerNotFoundError, DriverError, DriverNotFoundError
from transformer_rtc.manager import manager
from transformer_rtc.spec import ARCHITECTURES, FLOAT32
from transformer_rtc.version import __version__

HERE = os.path.dirname(__file__)
CUBIN = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + b"code of a GPU"
KEYS = [digest({"n": number}) for number in range(3)]
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
def run(capsys) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def cache(tmp_path) -> DiskCache:
    made = DiskCache(str(tmp_path / "cache"))
    for number, key in enumerate(KEYS):
        about = {"symbol": f"kernel{number}", "target": "sm_90", "kind": "cubin", "compiler": "nvrtc 1"}
        made.put(f"kernel{number}.sm_90", key, CUBIN, about)
    return made


def damage(cache: DiskCache, number: int) -> None:
    with open(cache.path(f"kernel{number}.sm_90", KEYS[number]), "ab") as file:
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


def test_the_version_and_the_two_names_of_the_command(run):
    assert run("--version") == (0, f"{__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "transformer_rtc", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")
    with open(os.path.join(HERE, "..", "..", "pyproject.toml"), encoding="utf-8") as file:
        assert '\n[project.scripts]\ntransformer-rtc = "transformer_rtc.cli:main"\n' in file.read()


def test_the_demo_compiles_runs_and_checks(run, monkeypatch, without_driver):
    monkeypatch.setattr(demo, "_MODELS", {96: "none"})
    monkeypatch.setattr(demo, "_dtypes", lambda: [FLOAT32])
    code, told, _ = run("demo", "--json")
    found = json.loads(told)
    assert code == 0 and found["device"] is None and "no NVIDIA driver" in found["reason"]
    (row,) = found["kernels"]
    assert row["kernel"].startswith("rms_norm_forward_f32_h96_") and row["error_ulp"] < 2
    assert list(row["compile_milliseconds"]) == [f"sm_{number}" for number in sorted(ARCHITECTURES)]
    code, told, _ = run("demo")
    assert code == 0 and "rms_norm_forward_f32_h96_" in told and "Not done: no kernel was loaded" in told


# ---- cache ----------------------------------------------------------------------------------------------------------


def test_list_and_show(cache, run):
    code, told, _ = run("cache", "list", "--folder", cache.folder)
    assert code == 0 and told.count("cubin by nvrtc 1") == 3 and "3 entries" in told
    damage(cache, 1)
    code, told, _ = run("cache", "list", "--folder", cache.folder, "--json")
    entries = json.loads(told)["entries"]
    assert [(entry["symbol"], entry["damaged"]) for entry in entries] == [
        ("kernel0", False), (None, True), ("kernel2", False),
    ]  # fmt: skip
    assert "damaged" in run("cache", "list", "--folder", cache.folder)[1]
    code, told, _ = run("cache", "show", "kernel2", "--folder", cache.folder)
    assert code == 0 and re.search(r"^key +" + KEYS[2], told, re.MULTILINE) and "kernel0" not in told
    code, told, error = run("cache", "show", "absent", "--folder", cache.folder)
    assert (code, told) == (1, "") and "starts with 'absent'" in error


def test_verify_finds_damage_and_prune_removes_it(cache, run):
    assert run("cache", "verify", "--folder", cache.folder)[:2] == (0, "3 entries, 0 damaged\n")
    damage(cache, 1)
    code, told, _ = run("cache", "verify", "--folder", cache.folder, "--json")
    assert code == 1 and json.loads(told)["damaged"] == [os.path.basename(cache.path("kernel1.sm_90", KEYS[1]))]
    code, told, _ = run("cache", "prune", "--folder", cache.folder)
    assert code == 0 and told.startswith("removed kernel1.sm_90.") and "2 entries" in told
    assert run("cache", "verify", "--folder", cache.folder)[0] == 0


@pytest.mark.parametrize("action", ["verify", "prune"])
def test_what_killed_writers_left_is_deleted(action, cache, run):
    name = f"{os.path.basename(cache.path('kernel', KEYS[0]))}.1.0123abcd.tmp"
    with open(os.path.join(cache.folder, name), "wb") as file:
        file.write(b"half")
    code, told, _ = run("cache", action, "--folder", cache.folder, "--json")
    assert code == 0 and json.loads(told)["removed"] == [name] and json.loads(told)["entries"] == 3
    assert name not in os.listdir(cache.folder)


def test_prune_by_size_and_age_and_clear(cache, run):
    os.utime(cache.path("kernel0.sm_90", KEYS[0]), (0, 0))
    code, told, _ = run("cache", "prune", "--folder", cache.folder, "--unused-days", "30", "--json")
    assert code == 0 and [name.partition(".")[0] for name in json.loads(told)["removed"]] == ["kernel0"]
    assert json.loads(run("cache", "prune", "--folder", cache.folder, "--max-size", "1", "--json")[1])["entries"] == 0
    cache.put("kernel0.sm_90", KEYS[0], CUBIN, {})
    assert "1 removed; 0 entries, 0 bytes stay" in run("cache", "clear", "--folder", cache.folder)[1]


def test_pack_and_unpack(cache, run, tmp_path):
    path, other = str(tmp_path / "pack"), str(tmp_path / "other")
    damage(cache, 1)
    code, told, _ = run("cache", "pack", path, "--folder", cache.folder)
    assert code == 0 and "left out kernel1" in told and f"2 entries in {path}" in told
    code, told, _ = run("cache", "unpack", path, "--folder", other, "--json")
    assert code == 0 and len(json.loads(told)["added"]) == 2
    assert DiskCache(other).get("kernel0.sm_90", KEYS[0]) == CUBIN
    with open(path, "ab") as file:
        file.write(b"?")
    code, told, error = run("cache", "unpack", path, "--folder", other)
    assert (code, told) == (1, "") and error.startswith("transformer-rtc: ") and "damaged" in error


def test_without_a_cache_there_is_one_error(run, monkeypatch):
    monkeypatch.setattr(cli, "manager", type(manager)(DiskCache(None)))
    for action in (("list",), ("pack", "x"), ("prune",)):
        code, told, error = run("cache", *action)
        assert (code, told) == (1, "") and "TRANSFORMER_RTC_CACHE_DIR is empty" in error


def test_who_reads_no_further_gets_no_traceback(cache):
    script = (
        "import sys; from transformer_rtc.cli import main\nsys.exit(main(['cache', 'list', '--folder', sys.argv[1]]))"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script, cache.folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    running.stdout.close()
    assert running.stderr.read() == b""
    running.stderr.close()
    assert running.wait(60) == 1


# ---- warmup ---------------------------------------------------------------------------------------------------------


def test_a_warm_up_from_the_command_line(tmp_path):
    arguments = ["warmup", "rms_norm", "--dtype", "float16", "--hidden", "64", "128", "--architecture", "sm_90"]
    arguments += ["--argument", "weight=float32", "return_rstd=true", "--json"]
    script = f"from transformer_rtc.cli import main; assert main({arguments!r}) == 0"
    found = json.loads(run_python(script, TRANSFORMER_RTC_CACHE_DIR=str(tmp_path)))
    assert (found["compiled"], found["cached"], found["failed"], found["kept"]) == (2, 0, 0, True)
    assert [record["symbol"].partition("_t")[0] for record in found["records"]] == [
        "rms_norm_forward_f16_weight_f32_rstd_h64", "rms_norm_forward_f16_weight_f32_rstd_h128",
    ]  # fmt: skip
    assert json.loads(run_python(script, TRANSFORMER_RTC_CACHE_DIR=str(tmp_path)))["cached"] == 2


def test_a_warm_up_that_keeps_nothing_fails(run, monkeypatch):
    nowhere = type(manager)(DiskCache(None), lambda *_: compiler.Compiled(CUBIN, "cubin", "", "1"), lambda: "1")
    monkeypatch.setattr(cli, "manager", nowhere)
    monkeypatch.setattr(warming, "manager", nowhere)
    arguments = ("warmup", "rms_norm", "--dtype", "float16", "--hidden", "64", "--architecture", "sm_90", "--quiet")
    code, told, error = run(*arguments)
    assert code == 1 and "compiled" in told and "could not be kept" in error


def test_a_warm_up_that_fails_exits_with_1_and_says_why(run, monkeypatch, tmp_path):
    def missing():
        raise CompilerNotFoundError("there is no NVRTC")

    monkeypatch.setattr(warming, "manager", type(manager)(DiskCache(str(tmp_path)), identity=missing))
    code, told, _ = run(
        "warmup", "rms_norm", "--dtype", "float16", "--hidden", "64", "--architecture", "sm_90", "--quiet"
    )
    assert code == 1 and "failed" in told and "there is no NVRTC" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "there is nothing to warm up"),
        (("norm",), "operators has 'norm'"),
        (("rms_norm", "--dtype", "float32", "--hidden", "8", "--argument", "x"), "it takes name=value"),
        (("rms_norm", "--dtype", "float32", "--hidden", "8", "--argument", "threads=2"), "--argument has threads"),
        (("rms_norm", "--dtype", "float32", "--hidden", "8", "--argument", "weight=big"), "weight is 'big'"),
        (("--manifest", "/nonexistent"), "cannot be read"),
    ],
)
def test_a_warm_up_that_cannot_be_exits_with_1(arguments, told, run):
    code, out, error = run("warmup", *arguments, "--architecture", "sm_90")
    assert (code, out) == (1, "") and told in error and error.startswith("transformer-rtc: ")


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"symbol": "absent"}, 'has no extern "C" __global__ absent; its entries are: '),
        ({"text": 'extern "C" __global__ void scale() { error }'}, "NVRTC could not compile scale"),
        ({"architecture": "90"}, "--architecture is '90'; it takes one such as sm_90"),
        ({"architecture": "sm_10"}, "NVRTC could not compile scale"),
        ({"field": "x"}, "field x has the type ''"),
        ({"option": "-I/usr/include"}, "the option -I/usr/include"),
        ({"output": "/nonexistent/x"}, "/nonexistent/x cannot be written"),
        ({"file": "/nonexistent/x.cu"}, "/nonexistent/x.cu cannot be read"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_exits_with_1(change, told, run, tmp_path):
    path = tmp_path / "scale.cu"
    path.write_text(change.get("text", 'extern "C" __global__ void scale() {}'))
    arguments = [change.get("file", str(path)), "--symbol", change.get("symbol", "scale")]
    arguments += ["--architecture", change.get("architecture", "sm_90")]
    arguments += [f"--{name}={change[name]}" for name in ("field", "option", "output") if name in change]
    code, out, error = run("compile", *arguments)
    assert (code, out) == (1, "") and told in error


# ---- info -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a maker of what info gathers on a machine with a GPU, where everything is well but what is changed."""

    class Native:
        driver = 13000
        devices = 1

        def driver_version(self):
            if isinstance(self.driver, Exception):
                raise self.driver
            return self.driver

        device_count = staticmethod(lambda: Native.devices)
        device_name = staticmethod(lambda ordinal: "GPU")
        device_memory = staticmethod(lambda ordinal: 2**30)

    native = Native()
    monkeypatch.setattr(info, "_native", native)
    monkeypatch.setattr(info, "device_limits", lambda ordinal: ARCHITECTURES[90])
    monkeypatch.setattr(info, "manager", type(manager)(DiskCache(str(tmp_path / "cache"))))
    monkeypatch.setattr(compiler, "compiler_identity", lambda: "nvidia_cuda_nvrtc_cu12 12.9.86")
    monkeypatch.setattr(compiler, "installed", lambda: ["nvidia_cuda_nvrtc_cu12 12.9.86 in /here"])
    return native


def missing_of(run: Run) -> list[str]:
    code, told, _ = run("info", "--json")
    found = json.loads(told)
    assert code == (1 if found["missing"] else 0)
    lines = run("info")[1]
    assert all(what in lines for what in found["missing"] + found["notes"])
    return found["missing"]


def test_info_on_a_machine_where_all_is_well(machine, run):
    assert missing_of(run) == []
    told = run("info")[1]
    assert "runs CUDA 13.0" in told and "GPU, 1 GiB, sm_90, 227 KiB" in told and "12.9.86" in told


def test_info_without_a_driver_and_with_one_that_is_too_old(machine, run):
    machine.driver = DriverNotFoundError("there is no libcuda.so.1")
    (what,) = missing_of(run)
    assert "install an NVIDIA driver" in what and "--gpus all" in what
    machine.driver = DriverError("the driver runs CUDA 11.8")
    (what,) = missing_of(run)
    assert what == "a driver that works: the driver runs CUDA 11.8"


def test_info_with_a_driver_and_no_gpu(machine, run):
    type(machine).devices = 0
    (what,) = missing_of(run)
    assert "CUDA_VISIBLE_DEVICES" in what


@pytest.mark.parametrize(
    ("driver", "identity", "too_old"),
    [
        (12040, "nvidia_cuda_nvrtc 13.0.88", True),
        (12040, "/usr/local/cuda/lib64/libnvrtc.so.13 100 5", True),
        (12000, "nvidia_cuda_nvrtc_cu12 12.9.86", False),
        (13000, "nvidia_cuda_nvrtc_cu12 12.9.86", False),
        (13000, "nvidia_cuda_nvrtc 13.1.2", False),
    ],
)
def test_info_tells_a_driver_that_refuses_the_compilers_cubins(machine, run, monkeypatch, driver, identity, too_old):
    machine.driver = driver
    monkeypatch.setattr(compiler, "compiler_identity", lambda: identity)
    found = missing_of(run)
    assert ["a driver for NVRTC 13" in what for what in found] == [True] * too_old


def test_info_without_nvrtc_and_with_two(machine, run, monkeypatch):
    two = ["nvidia_cuda_nvrtc_cu12 12.9.86 in /here", "nvidia_cuda_nvrtc 13.0.88 in /there"]
    monkeypatch.setattr(compiler, "installed", lambda: two)
    assert missing_of(run) == []
    assert "several NVRTCs are installed, and nvidia_cuda_nvrtc_cu12 12.9.86 is used: " in run("info")[1]

    def nothing():
        raise CompilerNotFoundError("nothing")

    monkeypatch.setattr(compiler, "compiler_identity", nothing)
    assert missing_of(run) == ["NVRTC: pip install 'transformer_rtc[cu12]', or [cu13] for a driver of CUDA 13"]


def test_every_installed_nvrtc_is_found(monkeypatch, tmp_path):
    for folder, name in (("a", "nvidia_cuda_nvrtc_cu12-12.8.1"), ("b", "nvidia_cuda_nvrtc_cu12-12.9.86"),
                         ("b", "nvidia_cuda_nvrtc-13.0.88")):  # fmt: skip
        (tmp_path / folder / f"{name}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a"), "/nonexistent"])
    assert compiler.installed() == [
        f"nvidia_cuda_nvrtc_cu12 12.8.1 in {tmp_path}/a",
        f"nvidia_cuda_nvrtc_cu12 12.9.86 in {tmp_path}/b",
        f"nvidia_cuda_nvrtc 13.0.88 in {tmp_path}/b",
    ]


def test_info_tells_a_cache_that_cannot_be_used(machine, run, monkeypatch, tmp_path):
    def use(folder, read_only=None):
        monkeypatch.setattr(info, "manager", type(manager)(DiskCache(folder, read_only)))
        return missing_of(run)

    (tmp_path / "file").write_bytes(b"")
    assert "file cannot be written" in use(str(tmp_path / "file" / "below"))[0]
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    assert "others may write to it" in use(str(tmp_path / "open"))[0]
    assert "the read-only cache" in use(str(tmp_path), str(tmp_path / "missing"))[0]
    assert use(None) == [] and use(str(tmp_path / "not" / "there" / "yet")) == []
    assert not (tmp_path / "not").exists()


def test_info_opens_no_compiler_and_no_framework(tmp_path):
    script = "from transformer_rtc.cli import main; main(['info', '--json']); print(sorted(opened() - {'libcuda.so'}))"
    *document, opened = run_python(script, TRANSFORMER_RTC_CACHE_DIR=str(tmp_path)).splitlines()
    assert opened == "[]" and json.loads("\n".join(document))["version"] == __version__
