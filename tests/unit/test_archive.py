# SPDX-License-Identifier: Apache-2.0
"""Packs carry entries between folders, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from stubs import CUBIN, HOST, KEYS

from transformer_rtc import archive
from transformer_rtc.cache import DiskCache
from transformer_rtc.cache_entry import encode_entry
from transformer_rtc.errors import PackError


@pytest.fixture
def source(tmp_path) -> DiskCache:
    cache = DiskCache(str(tmp_path / "source"))
    for number, key in enumerate(KEYS):
        cache.put(f"kernel{number}.sm_90", key, CUBIN + bytes([number]) * 1000, {"symbol": f"kernel{number}"})
    return cache


@pytest.fixture
def other(tmp_path) -> DiskCache:
    return DiskCache(str(tmp_path / "deep" / "other"))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "kernels.pack"


def entry(stem: str, key: str = KEYS[0], payload: bytes = CUBIN) -> bytes:
    return encode_entry({"stem": stem, "key": key, "bytes": len(payload)}, payload)


def pack_of(*entries: bytes) -> bytes:
    return b"transformer_rtc pack 1\n" + b"".join(b"%d\n" % len(data) + data for data in entries) + b"end\n"


def first_words(names) -> list[str]:
    return [name.partition(".")[0] for name in names]


def test_what_was_packed_is_unpacked_and_hits(source, other, path):
    packed, left_out = archive.pack(source, path)
    assert packed == source.names() and len(packed) == 4 and left_out == {}
    assert archive.unpack(other, path) == (packed, []) and other.names() == packed
    for number, key in enumerate(KEYS):
        stem = f"kernel{number}.sm_90"
        assert other.get(stem, key) == source.get(stem, key) == CUBIN + bytes([number]) * 1000
    assert archive.unpack(other, path) == ([], packed)
    again = path.with_suffix(".again")
    assert archive.pack(other, again)[0] == packed and again.read_bytes() == path.read_bytes()


def test_damaged_entries_and_modules_of_the_simulator_are_left_out(source, other, path):
    source.put("module.sm_90.fast", KEYS[0], HOST, {})
    with open(source.path("kernel1.sm_90", KEYS[1]), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    os.symlink(source.path("kernel0.sm_90", KEYS[0]), source.path("link", KEYS[0]))
    packed, left_out = archive.pack(source, path)
    assert first_words(packed) == ["kernel0", "kernel2", "kernel3"] and first_words(left_out) == ["kernel1", "module"]
    assert sorted(left_out.values()) == ["a module of the simulator", "damaged"]
    archive.unpack(other, path)
    assert other.names() == packed


def test_an_empty_cache_is_a_pack(tmp_path, other, path):
    assert archive.pack(DiskCache(str(tmp_path / "missing")), path) == ([], {})
    assert archive.unpack(other, path) == ([], [])


def refused(data: bytes, other: DiskCache, path: Path, told: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(PackError, match=told):
        archive.unpack(other, path)
    assert not os.path.exists(other.folder), data


def test_damage_anywhere_is_refused_and_nothing_is_unpacked(source, other, path, rng):
    archive.pack(source, path)
    good = path.read_bytes()
    for place in {*range(60), *range(len(good) - 60, len(good)), *map(int, rng.integers(0, len(good), 200))}:
        for damaged in (good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :], good[:place]):
            refused(damaged, other, path, "is no pack|is damaged at entry")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"transformer_rtc pack 2\nend\n",
        b"PK\x03\x04",
        pack_of(entry("kernel")) + b"more",
        pack_of(entry("kernel"))[:-4],
        pack_of(b"no entry"),
        pack_of(entry("kernel", payload=HOST)),
        pack_of(entry("kernel"), entry("kernel", payload=HOST)),
        *(b"transformer_rtc pack 1\n%b\n%b" % (length, entry("kernel")) for length in
          (b"0", b"-5", b"+5", b"1e3", b"999999999999", b"9" * 400, b"", b" 5", b"0x10", b"5_0")),
    ],
)  # fmt: skip
def test_what_is_no_pack_is_refused_and_nothing_is_unpacked(data, other, path):
    refused(data, other, path)


@pytest.mark.parametrize("key", ["../../../../escape/../" + "a" * 42, "a/" * 32, "A" * 64, "a" * 63, "a" * 65, ""])
def test_a_key_that_is_none_is_refused(key, other, path):
    refused(pack_of(entry("kernel", key)), other, path, "damaged at entry 1")


def test_a_link_in_an_entrys_place_is_replaced_and_not_followed(other, path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.makedirs(other.folder)
    os.chmod(other.folder, 0o755)
    os.symlink(victim, other.path("kernel", KEYS[0]))
    path.write_bytes(pack_of(entry("kernel")))
    archive.unpack(other, path)
    assert victim.read_bytes() == b"precious" and other.get("kernel", KEYS[0]) == CUBIN
    assert stat.S_ISREG(os.lstat(other.path("kernel", KEYS[0])).st_mode)


def test_an_entry_that_is_there_stays_and_a_damaged_one_is_replaced(source, other, path):
    archive.pack(source, path)
    other.put("kernel0.sm_90", KEYS[0], b"mine", {})
    other.put("kernel1.sm_90", KEYS[1], b"damaged", {})
    with open(other.path("kernel1.sm_90", KEYS[1]), "ab") as file:
        file.write(b"?")
    added, kept = archive.unpack(other, path)
    assert first_words(added) == ["kernel1", "kernel2", "kernel3"] and len(kept) == 1
    assert other.get("kernel0.sm_90", KEYS[0]) == b"mine"
    assert other.get("kernel1.sm_90", KEYS[1]) == CUBIN + bytes([1]) * 1000


def test_a_folder_that_others_may_write_to_gets_nothing(source, other, path):
    archive.pack(source, path)
    os.makedirs(other.folder)
    os.chmod(other.folder, 0o777)
    with pytest.raises(PackError, match="others may write to it"):
        archive.unpack(other, path)
    assert os.listdir(other.folder) == []


def test_files_that_cannot_be_written_or_read_are_told_and_leave_nothing(source, path, tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("missing/pack", "folder"):
        with pytest.raises(PackError, match="cannot be written"):
            archive.pack(source, str(tmp_path / name))
    with pytest.raises(PackError, match="cannot be unpacked"):
        archive.unpack(source, str(tmp_path / "missing"))
    assert sorted(os.listdir(tmp_path)) == ["folder", "source"]
    archive.pack(source, path)
    with pytest.raises(PackError, match="cannot be unpacked"):
        archive.unpack(DiskCache(None), path)
