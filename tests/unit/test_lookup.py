# SPDX-License-Identifier: Apache-2.0
"""What another NVRTC has compiled: where it is used, where it is a miss, and what a message says of it."""

from __future__ import annotations

import dataclasses

import pytest
from stubs import CUBIN, CubinCompiler, refusing, without_gpu

from transformer_rtc import archive
from transformer_rtc.cache import DiskCache
from transformer_rtc.companion import INDEX, PACK, Companion
from transformer_rtc.errors import CompilerNotFoundError, DriverError, UnexpectedCompileError
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.settings import read
from transformer_rtc.spec import TextSpec

SETTINGS = read({"TRANSFORMER_RTC_CACHE_DIR": ""})
FIRST = TextSpec('extern "C" __global__ void first() {}', "first")
REFUSAL = "loading first: CUDA_ERROR_NO_BINARY_FOR_GPU"


@pytest.fixture
def compiler(monkeypatch) -> CubinCompiler:
    without_gpu(monkeypatch)
    return CubinCompiler()


@pytest.fixture
def make(compiler, tmp_path):
    """Return a maker of managers with a folder of their own and one that is only read."""

    def make(identity="nvrtc 1", own="own", shipped="shipped", **changes) -> KernelManager:
        compiler.really = identity
        (tmp_path / "shipped").mkdir(exist_ok=True)
        cache = DiskCache(str(tmp_path / own), str(tmp_path / shipped) if shipped else None)
        return KernelManager(cache, compiler, lambda: identity, dataclasses.replace(SETTINGS, **changes))

    return make


@pytest.fixture
def ship(make):
    """Return what fills a folder with what some NVRTCs compile."""

    def ship(*identities: str, folder: str = "shipped") -> None:
        for identity in identities:
            make(identity, own=folder, shipped=None).image(FIRST, 90)

    return ship


def none() -> str:
    raise CompilerNotFoundError("there is no NVRTC")


def test_a_read_only_folder_serves_what_another_nvrtc_made_and_this_ones_own_first(make, ship, compiler):
    ship("nvrtc 10", "nvrtc 9")
    manager = make(on_compile="error")
    told = []
    manager.on_event(lambda event: told.append((event.kind, event.origin)))
    assert manager.is_compiled(FIRST, 0) and manager.get(FIRST, 0).image == CUBIN + b"firstnvrtc 9"
    assert told == [("load", "disk")] and manager.cache.names() == []  # it is not copied
    ship("nvrtc 1")
    assert make(on_compile="error").get(FIRST, 0).image == CUBIN + b"firstnvrtc 1"


def test_an_unpacked_pack_serves_as_the_folder_that_was_packed(make, ship, tmp_path):
    ship("nvrtc 0", folder="packed")
    archive.pack(DiskCache(str(tmp_path / "packed")), str(tmp_path / "kernels.pack"))
    archive.unpack(DiskCache(str(tmp_path / "shipped")), str(tmp_path / "kernels.pack"))
    assert make().image(FIRST, 90).data == CUBIN + b"firstnvrtc 0"


def test_the_users_own_folder_and_other_texts_options_and_architectures_are_misses(make, ship):
    ship("nvrtc 0", folder="own")
    assert make(shipped=None).image(FIRST, 90).origin == "compiler"
    ship("nvrtc 0")
    for change in ({"text": f"{FIRST.text}\n"}, {"options": ("-G",)}):
        assert make().image(dataclasses.replace(FIRST, **change), 90).origin == "compiler"
    assert make().image(FIRST, 100).origin == "compiler"


def test_what_the_driver_refuses_is_a_miss_once_for_all_and_ones_own_refused_kernel_an_error(make, ship, monkeypatch):
    ship("nvrtc 0")
    refusing(monkeypatch, b"nvrtc 0", REFUSAL)
    second = dataclasses.replace(FIRST, name="second")
    make("nvrtc 0", own="shipped", shipped=None).image(second, 90)
    manager = make()
    assert [manager.get(spec, 0).image for spec in (FIRST, second)] == [
        CUBIN + b"firstnvrtc 1",
        CUBIN + b"secondnvrtc 1",
    ]
    assert manager.counts == {"compile": 2, "load": 2}
    with pytest.raises(UnexpectedCompileError, match="compiled there by nvrtc 0"):
        make(own="empty", on_compile="error").get(FIRST, 0)
    refusing(monkeypatch, b"nvrtc 1", REFUSAL)
    with pytest.raises(DriverError, match="NO_BINARY"):
        make(shipped=None).get(FIRST, 0)


def test_the_companion_is_asked_for_what_the_driver_refuses_of_the_read_only_folder(make, ship, monkeypatch, tmp_path):
    ship("nvrtc 2")
    ship("nvrtc 0", folder="made")
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    archive.pack(DiskCache(str(tmp_path / "made")), str(wheel / PACK.format("sm_90")))
    (wheel / INDEX.format("sm_90")).write_bytes(archive.index(str(wheel / PACK.format("sm_90"))))
    refusing(monkeypatch, b"nvrtc 2", REFUSAL)
    manager = make()
    manager.cache.companion = Companion(lambda: str(wheel))
    assert manager.get(FIRST, 0).image == CUBIN + b"firstnvrtc 0"
    strict = make(shipped=None, other_nvrtc=False)
    strict.cache.companion = Companion(lambda: str(wheel))
    assert strict.image(FIRST, 90).origin == "compiler"
    of_same = make("nvrtc 0", own="empty", shipped=None, other_nvrtc=False)
    of_same.cache.companion = Companion(lambda: str(wheel))
    assert of_same.image(FIRST, 90).origin == "companion"


def test_a_setting_refuses_what_another_nvrtc_made_with_a_compiler_and_without(make, ship, monkeypatch):
    ship("nvrtc 0")
    assert make(other_nvrtc=False).image(FIRST, 90).origin == "compiler"
    manager = make(own="empty", other_nvrtc=False)
    monkeypatch.setattr(manager._nvrtc, "identity", none)
    with pytest.raises(CompilerNotFoundError, match="there is no NVRTC"):
        manager.image(FIRST, 90)
    assert not read({"TRANSFORMER_RTC_OTHER_NVRTC": "off"}).other_nvrtc and read({}).other_nvrtc


def test_without_an_nvrtc_ones_own_folder_serves_what_any_made(make, ship, monkeypatch):
    ship("nvrtc 0", folder="own")
    second = dataclasses.replace(FIRST, name="second")
    make("nvrtc 1", shipped=None).image(second, 90)
    refusing(monkeypatch, b"firstnvrtc 0", REFUSAL)
    # Whatever the setting says, which is of other folders; and one refusal is no other kernel's.
    manager = make(shipped=None, other_nvrtc=False)
    monkeypatch.setattr(manager._nvrtc, "identity", none)
    with pytest.raises(DriverError, match="NO_BINARY"):
        manager.get(FIRST, 0)
    assert manager.get(second, 0).image == CUBIN + b"secondnvrtc 1"


def test_a_manager_looks_in_the_cache_that_it_is_given_later(make, ship):
    ship("nvrtc 1", folder="own")
    manager = make()
    manager.cache = DiskCache(None)
    assert manager.image(FIRST, 90).origin == "compiler"


def test_a_frozen_miss_names_the_folders_the_key_and_what_differs(make, ship, tmp_path):
    def refused(spec, **changes) -> str:
        manager = make(on_compile="error", **changes)
        with pytest.raises(UnexpectedCompileError) as caught:
            manager.image(spec, 90)
        assert caught.value.key in str(caught.value) and str(tmp_path / "own") in str(caught.value)
        return str(caught.value)

    assert "there" not in refused(FIRST) and str(tmp_path / "shipped") in refused(FIRST)
    ship("nvrtc 0", folder="own")
    assert "it was compiled there by nvrtc 0, and this compiler is nvrtc 1" in refused(FIRST, shipped=None)
    other = dataclasses.replace(FIRST, text=f"{FIRST.text}\n")
    assert "was made of another text, headers or options" in refused(other, shipped=None)
    ship("nvrtc 2")
    assert "by nvrtc 0, nvrtc 2, and" in refused(FIRST, other_nvrtc=False)
