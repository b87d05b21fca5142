# SPDX-License-Identifier: Apache-2.0
"""Kernels of the companion wheel: where they come in the order, and what is a miss."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from processes import output
from stubs import CUBIN, CubinCompiler, refusing, without_gpu

from transformer_rtc import archive, warming
from transformer_rtc.cache import DiskCache
from transformer_rtc.companion import INDEX, PACK, PACKAGE, Companion
from transformer_rtc.errors import (
    CompilerNotFoundError,
    DriverError,
    PackError,
    SettingsError,
    UnexpectedCompileError,
)
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.settings import read
from transformer_rtc.spec import Target, TextSpec

SETTINGS = read({"TRANSFORMER_RTC_CACHE_DIR": ""})
SPECS = FIRST, SECOND, THIRD = tuple(
    TextSpec(f'extern "C" __global__ void {name}() {{}}', name) for name in ("first", "second", "third")
)
NAMES = PACK.format("sm_90"), INDEX.format("sm_90")


@pytest.fixture
def compiler(monkeypatch) -> CubinCompiler:
    without_gpu(monkeypatch)
    return CubinCompiler()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a companion wheel's folder, with two kernels that another NVRTC has compiled for sm_90."""
    compiler = CubinCompiler()
    compiler.really = "nvrtc 0"
    made = KernelManager(DiskCache(str(tmp_path / "made")), compiler)
    for spec in (FIRST, SECOND):
        made.image(spec, 90)
    folder = tmp_path / PACKAGE
    folder.mkdir()
    archive.pack(made.cache, folder / NAMES[0])
    (folder / NAMES[1]).write_bytes(archive.index(folder / NAMES[0]))
    return folder


@pytest.fixture
def make(compiler, tmp_path, folder):
    """Return a maker of managers, as processes would have them."""

    def make(identity="nvrtc 1", read_only=None, cache=True, **changes) -> KernelManager:
        disk = DiskCache(str(tmp_path / "cache") if cache else None, read_only)
        options = dataclasses.replace(SETTINGS, **changes)
        disk.companion = Companion(lambda: str(folder))
        return KernelManager(disk, compiler, lambda: identity, options)

    return make


def with_path(folder: Path) -> str:
    """Return a PYTHONPATH that begins with a folder."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def none() -> str:
    raise CompilerNotFoundError("there is no NVRTC")


def test_the_caches_folders_come_first_then_the_companion_then_a_compile(make, compiler, tmp_path):
    manager = make()
    told = []
    manager.on_event(told.append)
    assert [manager.get(spec, 0).image for spec in SPECS] == [
        CUBIN + b"firstnvrtc 0", CUBIN + b"secondnvrtc 0", CUBIN + b"thirdnvrtc 1",
    ]  # fmt: skip
    assert [(event.kind, event.origin) for event in told] == [
        ("load", "companion"), ("load", "companion"), ("compile", "compiler"), ("load", "compiler"),
    ]  # fmt: skip
    assert [name.partition(".")[0] for name in manager.cache.names()] == ["third"]  # the companion's is not copied
    origins = {}
    for name in ("cache", "image"):
        KernelManager(DiskCache(str(tmp_path / name)), compiler, lambda: "nvrtc 1", SETTINGS).image(FIRST, 90)
        origins[name] = make(read_only=str(tmp_path / "image")).image(FIRST, 90).origin
        for entry in (tmp_path / "cache").glob("first.*"):
            entry.unlink()
    assert origins == {"cache": "disk", "image": "disk"}
    assert make().image(FIRST, 90).origin == make(cache=False).image(FIRST, 90).origin == "companion"


def test_nothing_compiles_what_it_has_whichever_nvrtc_there_is_or_none(make, compiler, monkeypatch):
    manager = make(on_compile="error")
    monkeypatch.setattr(manager._nvrtc, "identity", none)
    assert manager.is_compiled(FIRST, 0) and manager.get(FIRST, 0).image == CUBIN + b"firstnvrtc 0"
    with pytest.raises(CompilerNotFoundError, match="there is no NVRTC"):
        manager.get(THIRD, 0)
    manager = make()
    manager.freeze()
    assert [manager.is_compiled(spec, 0) for spec in SPECS] == [True, True, False]
    assert manager.get_all((FIRST, SECOND), 0) and compiler.calls == []
    with pytest.raises(UnexpectedCompileError, match="third for sm_90 is not in the cache"):
        manager.get(THIRD, 0)
    static = make(force_static=True)
    assert static.image(FIRST, 90).origin == "companion"
    with pytest.raises(SettingsError, match="forbids the compile of third"):
        static.image(THIRD, 90)


def test_a_warm_up_finds_them_cached(make, compiler, monkeypatch):
    monkeypatch.setattr(warming, "manager", make())
    records = warming.warmup(manifest=SPECS, architectures="sm_90")
    assert [record.status for record in records] == ["cached", "cached", "compiled"]


def test_other_architectures_texts_and_options_are_misses(make, compiler):
    manager = make()
    others = dataclasses.replace(FIRST, text=f"{FIRST.text}\n"), dataclasses.replace(FIRST, options=("-G",))
    assert [manager.image(spec, 90).origin for spec in others] == ["compiler"] * 2
    assert manager.image(FIRST, Target(100)).origin == "compiler" and manager.get(FIRST, 7) is not None
    assert manager.cache.companion.count("sm_90") == 2 and manager.cache.companion.count("sm_100") == 0


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pack, index: (flip(pack, len(pack) - 8), flip(pack, 40), index, index),
        lambda pack, index: (pack[: len(pack) // 4], b"", index, index),
        lambda pack, index: (pack, pack, index[:10], b""),
        lambda pack, index: (pack, pack, index[:16] + b"\xff" * 12 + index[28:44] + b"\xff" * 12, flip(index, 1)),
        lambda pack, index: (pack, pack, index[28:44] + index[16:28] + index[:16] + index[44:], b"?" * 5000),
        lambda pack, index: (None, pack, index, None),
    ],
    ids=["flipped bits", "short packs", "short indexes", "wild places", "other places", "missing files"],
)
def test_what_is_damaged_is_compiled(damage, make, compiler, folder):
    found = [(folder / name).read_bytes() for name in NAMES]
    packs, indexes = (damage(*found)[part] for part in (slice(0, 2), slice(2, 4)))
    for contents in zip(packs, indexes, strict=True):
        for name, content in zip(NAMES, contents, strict=True):
            (folder / name).write_bytes(content) if content is not None else (folder / name).unlink(missing_ok=True)
        manager = make(cache=False)
        origins = {manager.image(spec, 90).origin for spec in (FIRST, SECOND)}
        assert "compiler" in origins
        images = [manager.image(spec, 90).data for spec in (FIRST, SECOND)]
        assert all(data.startswith(CUBIN + spec.symbol.encode()) for spec, data in zip(SPECS, images, strict=False))


def test_it_is_looked_for_once_at_the_first_miss_of_the_cache(compiler, tmp_path, folder):
    found = []
    cache = DiskCache(str(tmp_path / "cache"))
    for where in (None, str(folder)):
        cache.companion = Companion(lambda where=where: found.append(where) or where)
        manager = KernelManager(cache, compiler, lambda: "nvrtc 1", SETTINGS)
        manager.image(THIRD, 90)
        assert found == [None]  # the second one finds it in the cache
    assert [manager.image(spec, 90).origin for spec in (FIRST, SECOND)] == ["companion"] * 2
    assert found == [None, str(folder)]


def test_what_the_driver_refuses_is_compiled_and_the_companion_is_asked_for_no_more(make, compiler, monkeypatch):
    refusing(monkeypatch, b"nvrtc 0", "loading first: CUDA_ERROR_NO_BINARY_FOR_GPU")
    manager = make()
    assert manager.image(SECOND, 90).origin == "companion"  # as a warm-up would
    told = []
    manager.on_event(lambda event: told.append((event.kind, event.origin)))
    assert [manager.get(spec, 0).image for spec in (FIRST, SECOND)] == [
        CUBIN + b"firstnvrtc 1", CUBIN + b"secondnvrtc 1",
    ]  # fmt: skip
    assert told == [("compile", "compiler"), ("load", "compiler")] * 2 and manager.cache.companion is None
    frozen = make(cache=False, on_compile="error")
    with pytest.raises(UnexpectedCompileError, match="first for sm_90"):
        frozen.get(FIRST, 0)


def test_other_failures_of_the_driver_compile_nothing(make, compiler, monkeypatch):
    refusing(monkeypatch, b"nvrtc 0", "loading first: CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        make().get(FIRST, 0)
    refusing(monkeypatch, b"nvrtc 1", "loading third: CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(DriverError, match="INVALID_IMAGE"):
        make().get(THIRD, 0)
    assert compiler.symbols == ["third"]


def test_a_damaged_pack_has_no_index(folder):
    path = folder / NAMES[0]
    path.write_bytes(flip(path.read_bytes(), 60))
    with pytest.raises(PackError, match="damaged at entry 1"):
        archive.index(path)


@pytest.mark.parametrize(("setting", "told"), [({}, ["companion"]), ({"COMPANION": "off"}, ["failed"])], ids=str)
def test_a_process_finds_it_where_it_is_installed_and_imports_nothing_of_it(setting, told, folder):
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    script = """
import sys
import transformer_rtc as t
from transformer_rtc.errors import UnexpectedCompileError
assert "transformer_rtc.companion" not in sys.modules
try:
    print(t.manager.image(t.TextSpec('extern "C" __global__ void first() {}', "first"), 90).origin)
except UnexpectedCompileError:
    print("failed")
"""
    assert (
        output(script, {"PYTHONPATH": with_path(folder.parent)}, CACHE_DIR="", ON_COMPILE="error", **setting).split()
        == told
    )


CALLS = """
t.manager.on_event(lambda event: print(event.kind, event.origin))
x, weight = array(64, 4096), array(4096)
t.rms_norm(x, weight)
t.rms_norm_backward(x, x, weight)
t.softmax(x)
"""


def test_calls_of_a_frozen_process_load_all_kernels_from_it(fake_driver, tmp_path, monkeypatch):
    cold = fake_driver(CALLS, CACHE_DIR=str(tmp_path / "cache"))
    assert cold.count("compile compiler") == cold.count("load compiler") == len(cold) / 2 >= 3
    folder = tmp_path / PACKAGE
    folder.mkdir()
    archive.pack(DiskCache(str(tmp_path / "cache")), folder / NAMES[0])
    (folder / NAMES[1]).write_bytes(archive.index(folder / NAMES[0]))
    monkeypatch.setenv("PYTHONPATH", with_path(tmp_path))
    frozen = fake_driver(CALLS, CACHE_DIR=str(tmp_path / "empty"), ON_COMPILE="error")
    assert frozen == ["load companion"] * (len(cold) // 2) and not (tmp_path / "empty").exists()
