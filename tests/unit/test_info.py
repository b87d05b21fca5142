# SPDX-License-Identifier: Apache-2.0
"""`transformer-rtc info`: what it tells of a machine, what is missing there, and what to do."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from collections.abc import Callable

import pytest
from processes import output
from stubs import CUBIN, KEYS

from transformer_rtc import archive, compiler, info, warming
from transformer_rtc.cache import DiskCache
from transformer_rtc.companion import Companion
from transformer_rtc.compiler import Compiled
from transformer_rtc.errors import CompilerNotFoundError, DriverError, DriverNotFoundError
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.manifest import line, parse
from transformer_rtc.request import Asked
from transformer_rtc.spec import ARCHITECTURES, FLOAT32, TextSpec
from transformer_rtc.version import __version__


class Machine:
    """What info gathers on a machine with a GPU, where everything is well but what a test changes."""

    def __init__(self, run: Callable[..., tuple[int, str, str]]) -> None:
        self.run = run
        self.driver, self.devices, self.identity = 13000, 1, "nvidia_cuda_nvrtc_cu12 12.9.86"

    def given(self, name: str):
        value = getattr(self, name)
        if isinstance(value, Exception):
            raise value
        return value

    def missing(self) -> list[str]:
        code, told, _ = self.run("info", "--json")
        found = json.loads(told)
        assert code == (1 if found["missing"] else 0)
        lines = self.run("info")[1]
        assert all(what in lines for what in found["missing"] + found["notes"])
        return found["missing"]


@pytest.fixture
def machine(monkeypatch, tmp_path, run) -> Machine:
    made = Machine(run)
    native = types.SimpleNamespace(
        driver_version=lambda: made.given("driver"), device_count=lambda: made.devices,
        device_name=lambda ordinal: "GPU", device_memory=lambda ordinal: 2**30,
    )  # fmt: skip
    monkeypatch.setattr(info, "_native", native)
    monkeypatch.setattr(info, "device_limits", lambda ordinal: ARCHITECTURES[90])
    monkeypatch.setattr(info, "manager", KernelManager(DiskCache(str(tmp_path / "cache"))))
    monkeypatch.setattr(compiler, "compiler_identity", lambda: made.given("identity"))
    monkeypatch.setattr(compiler, "installed", lambda: ["nvidia_cuda_nvrtc_cu12 12.9.86 in /here"])
    return made


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ()),
        ({"driver": DriverNotFoundError("there is no libcuda")}, ("install an NVIDIA driver", "--gpus all")),
        ({"driver": DriverError("the driver runs CUDA 11.8")}, ("a driver that works: the driver runs CUDA 11.8",)),
        ({"devices": 0}, ("CUDA_VISIBLE_DEVICES",)),
        ({"driver": 12040, "identity": "nvidia_cuda_nvrtc 13.0.88"}, ("a driver for NVRTC 13",)),
        ({"driver": 12040, "identity": "/usr/local/cuda/lib64/libnvrtc.so.13 100 5"}, ("a driver for NVRTC 13",)),
        ({"driver": 12000, "identity": "nvidia_cuda_nvrtc_cu12 12.9.86"}, ()),
        ({"driver": 13000, "identity": "nvidia_cuda_nvrtc 13.1.2"}, ()),
        (
            {"identity": CompilerNotFoundError("nothing")},
            ("NVRTC: pip install 'transformer_rtc[cu12]', or [cu13] for a driver of CUDA 13",),
        ),
    ],
    ids=str,
)
def test_info_tells_what_is_missing_and_what_to_do(changes, told, machine):
    vars(machine).update(changes)
    found = machine.missing()
    assert len(found) == bool(told) and all(words in found[0] for words in told)


def test_info_without_a_cpp_compiler_promises_no_simulator_where_there_is_no_gpu(machine, monkeypatch):
    def none():
        raise CompilerNotFoundError("neither g++ nor clang++ is on PATH")

    monkeypatch.setattr(info.toolchain, "compiler_identity", none)
    assert machine.missing() == []
    machine.driver = DriverNotFoundError("there is no libcuda")
    gpu, compiler = machine.missing()
    assert gpu.endswith("start it with --gpus all.") and compiler.startswith("a C++ compiler: neither g++ nor ")
    machine.driver, machine.devices = 13000, 0
    assert len(machine.missing()) == 2


def test_info_tells_of_gpus_that_are_too_old(machine, monkeypatch):
    old = ARCHITECTURES[80]._replace(architecture=75)
    monkeypatch.setattr(info, "device_limits", lambda ordinal: old if ordinal == 0 else ARCHITECTURES[90])
    (missing,) = machine.missing()
    assert missing.startswith("a GPU that is new enough: cuda:0 has compute capability 7.5; transformer_rtc needs 8.0")
    machine.devices = 2
    assert machine.missing() == [] and "cuda:0 has compute capability 7.5" in machine.run("info")[1]


def test_info_describes_a_machine_and_notes_a_second_nvrtc(machine, run, monkeypatch):
    told = run("info")[1]
    assert "runs CUDA 13.0" in told and "GPU, 1 GiB, sm_90, 227 KiB" in told and "12.9.86" in told
    two = ["nvidia_cuda_nvrtc_cu12 12.9.86 in /here", "nvidia_cuda_nvrtc 13.0.88 in /there"]
    monkeypatch.setattr(compiler, "installed", lambda: two)
    assert machine.missing() == []
    assert (
        "several NVRTCs are installed, and nvidia_cuda_nvrtc_cu12 12.9.86 is used, as cuda-bindings " in run("info")[1]
    )
    assert "ninstall" not in run("info")[1]


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


def test_info_tells_a_cache_that_cannot_be_used(machine, monkeypatch, tmp_path):
    def use(folder, read_only=None):
        monkeypatch.setattr(info, "manager", KernelManager(DiskCache(folder, read_only)))
        return machine.missing()

    (tmp_path / "file").write_bytes(b"")
    assert "file cannot be written" in use(str(tmp_path / "file" / "below"))[0]
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    assert "others may write to it" in use(str(tmp_path / "open"))[0]
    assert "the read-only cache" in use(str(tmp_path), str(tmp_path / "missing"))[0]
    assert use(None) == [] and use(str(tmp_path / "not" / "there" / "yet")) == []
    assert "others may write to it" in use(str(tmp_path), str(tmp_path / "open"))[0]
    DiskCache(str(tmp_path / "image")).put("shipped.sm_90", KEYS[3], CUBIN, {})
    assert use(str(tmp_path), str(tmp_path / "image")) == []
    assert re.search(r"^read-only cache +\S+/image, 1 entries, \d+ KiB$", machine.run("info")[1], re.MULTILINE)
    assert not (tmp_path / "not").exists()


def test_info_tells_of_the_companion_wheel_and_how_much_of_it_fits(machine, monkeypatch, tmp_path):
    folder, cache = tmp_path / "companion", DiskCache(str(tmp_path / "made"))
    folder.mkdir()
    lines = [line(Asked(warming.request_of("rms_norm", FLOAT32, columns, False, False, {}))) for columns in (64, 128)]
    maker = KernelManager(cache, lambda symbol, *_: Compiled(CUBIN, "cubin", "", "nvrtc 1"), lambda: "nvrtc 1")
    for spec in (*warming.kernels_of(parse(lines[0]), ARCHITECTURES[90]), TextSpec("// of another version", "other")):
        maker.image(spec, 90)
    archive.pack(cache, folder / "sm_90.pack")
    (folder / "sm_90.index").write_bytes(archive.index(folder / "sm_90.pack"))

    def told(companion):
        manager = KernelManager(DiskCache(str(tmp_path / "cache")))
        manager.cache.companion = companion
        monkeypatch.setattr(info, "manager", manager)
        assert machine.missing() == []
        return next(line for line in machine.run("info")[1].splitlines() if line.startswith("companion wheel"))

    (folder / "kernels.jsonl").write_text("\n".join(lines))
    assert told(Companion(lambda: str(folder))).endswith(f" {folder}, 2 kernels for sm_90, 1 fit this version on sm_90")
    (folder / "kernels.jsonl").write_text("{}")
    assert told(Companion(lambda: str(folder))).endswith(f" {folder}, 2 kernels for sm_90")
    assert "transformer-rtc-kernels was built for another version" in machine.run("info")[1]
    assert told(Companion(lambda: None)).endswith(" transformer-rtc-kernels is not installed")
    assert told(None).endswith(" off: TRANSFORMER_RTC_COMPANION=off")


def test_info_opens_no_compiler_and_no_framework(tmp_path):
    script = "from transformer_rtc.cli import main; main(['info', '--json']); print(set(opened()) - {'libcuda.so'})"
    *told, opened = output(script, CACHE_DIR=str(tmp_path)).splitlines()
    assert opened == "set()" and json.loads("\n".join(told))["version"] == __version__
