"""Packs carry entries between folders, and nothing else."""

from __future__ import annotations

import os
import stat

import pytest

from transformer_rtc import packs
from transformer_rtc.cache import DiskCache, digest, encode_entry
from transformer_rtc.errors import PackError

CUBIN = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + b"code of a GPU"
HOST = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + b"code of a CPU"
KEYS = [digest({"n": number}) for number in range(4)]


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
def path(tmp_path) -> str:
    return str(tmp_path / "kernels.pack")


def entry(stem: str, key: str = KEYS[0], payload: bytes = CUBIN) -> bytes:
    return encode_entry({"stem": stem, "key": key, "bytes": len(payload)}, payload)


def pack_of(*entries: bytes) -> bytes:
    return b"transformer_rtc pack 1\n" + b"".join(b"%d\n" % len(data) + data for data in entries) + b"end\n"


def everything_below(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_was_packed_is_unpacked_and_hits(source, other, path):
    packed, left_out = packs.pack(source, path)
    assert packed == source.names() and len(packed) == 4 and left_out == []
    assert packs.unpack(other, path) == (packed, [])
    assert other.names() == packed
    for number, key in enumerate(KEYS):
        stem = f"kernel{number}.sm_90"
        assert other.get(stem, key) == source.get(stem, key) == CUBIN + bytes([number]) * 1000
    assert packs.unpack(other, path) == ([], packed)
    assert packs.pack(other, f"{path}2")[0] == packed
    with open(path, "rb") as first, open(f"{path}2", "rb") as second:
        assert first.read() == second.read()


def test_damaged_entries_and_modules_of_the_simulator_are_left_out(source, other, path):
    source.put("module.sm_90.fast", KEYS[0], HOST, {})
    with open(source.path("kernel1.sm_90", KEYS[1]), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    os.symlink(source.path("kernel0.sm_90", KEYS[0]), source.path("link", KEYS[0]))
    packed, left_out = packs.pack(source, path)
    assert [name.partition(".")[0] for name in packed] == ["kernel0", "kernel2", "kernel3"]
    assert [name.partition(".")[0] for name in left_out] == ["kernel1", "module"]
    packs.unpack(other, path)
    assert other.names() == packed


def test_an_empty_cache_is_a_pack(tmp_path, other, path):
    assert packs.pack(DiskCache(str(tmp_path / "missing")), path) == ([], [])
    assert packs.unpack(other, path) == ([], [])


def test_damage_anywhere_is_refused_and_nothing_is_unpacked(source, other, path, rng):
    packs.pack(source, path)
    with open(path, "rb") as file:
        good = file.read()
    places = {*range(60), *range(len(good) - 60, len(good)), *map(int, rng.integers(0, len(good), 400))}
    for place in places:
        for damaged in (good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :], good[:place]):
            with open(path, "wb") as file:
                file.write(damaged)
            with pytest.raises(PackError, match=r"is no pack|is damaged at entry"):
                packs.unpack(other, path)
            assert not os.path.exists(other.folder), place


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
    with open(path, "wb") as file:
        file.write(data)
    with pytest.raises(PackError):
        packs.unpack(other, path)
    assert not os.path.exists(other.folder)


@pytest.mark.parametrize("stem", ["../../escape", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 5000, "locks/abc"])
def test_no_name_leaves_the_folder(stem, other, path, tmp_path):
    before = everything_below(tmp_path)
    with open(path, "wb") as file:
        file.write(pack_of(entry(stem)))
    packs.unpack(other, path)
    made = everything_below(tmp_path) - before - {"kernels.pack", "deep", "deep/other"}
    assert len(made) == 1
    assert os.path.dirname(made.pop()) == "deep/other"
    assert other.get(stem, KEYS[0]) == CUBIN


@pytest.mark.parametrize("key", ["../../../../escape/../" + "a" * 42, "a/" * 32, "A" * 64, "a" * 63, "a" * 65, ""])
def test_a_key_that_is_none_is_refused(key, other, path):
    with open(path, "wb") as file:
        file.write(pack_of(entry("kernel", key)))
    with pytest.raises(PackError, match="damaged at entry 1"):
        packs.unpack(other, path)
    assert not os.path.exists(other.folder)


def test_a_link_in_an_entrys_place_is_replaced_and_not_followed(other, path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.makedirs(other.folder)
    os.chmod(other.folder, 0o755)
    os.symlink(victim, other.path("kernel", KEYS[0]))
    with open(path, "wb") as file:
        file.write(pack_of(entry("kernel")))
    packs.unpack(other, path)
    assert victim.read_bytes() == b"precious" and other.get("kernel", KEYS[0]) == CUBIN
    assert stat.S_ISREG(os.lstat(other.path("kernel", KEYS[0])).st_mode)


def test_an_entry_that_is_there_stays_and_a_damaged_one_is_replaced(source, other, path):
    packs.pack(source, path)
    other.put("kernel0.sm_90", KEYS[0], b"mine", {})
    other.put("kernel1.sm_90", KEYS[1], b"damaged", {})
    with open(other.path("kernel1.sm_90", KEYS[1]), "ab") as file:
        file.write(b"?")
    added, kept = packs.unpack(other, path)
    assert [name.partition(".")[0] for name in added] == ["kernel1", "kernel2", "kernel3"] and len(kept) == 1
    assert other.get("kernel0.sm_90", KEYS[0]) == b"mine"
    assert other.get("kernel1.sm_90", KEYS[1]) == CUBIN + bytes([1]) * 1000


def test_a_folder_that_others_may_write_to_gets_nothing(source, other, path):
    packs.pack(source, path)
    os.makedirs(other.folder)
    os.chmod(other.folder, 0o777)
    with pytest.raises(PackError, match="others may write to it"):
        packs.unpack(other, path)
    assert os.listdir(other.folder) == []


def test_files_that_cannot_be_written_or_read_are_told_and_leave_nothing(source, tmp_path):
    with pytest.raises(PackError, match="cannot be written"):
        packs.pack(source, str(tmp_path / "missing" / "pack"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(PackError, match="cannot be written"):
        packs.pack(source, str(tmp_path / "folder"))
    with pytest.raises(PackError, match="cannot be unpacked"):
        packs.unpack(source, str(tmp_path / "missing"))
    assert sorted(os.listdir(tmp_path)) == ["folder", "source"]
    with pytest.raises(PackError, match="cannot be unpacked"):
        packs.unpack(DiskCache(None), _pack(source, tmp_path))


def _pack(source, tmp_path) -> str:
    packs.pack(source, str(tmp_path / "pack"))
    return str(tmp_path / "pack")
