# SPDX-License-Identifier: Apache-2.0
"""One cache folder: what is kept, what is damaged, and what cannot be written."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from stubs import KEYS, in_processes, in_threads

from transformer_rtc.cache import DiskCache, digest
from transformer_rtc.cache_entry import encode_entry, parse_entry

KEY, OTHER, *_ = KEYS
PAYLOAD = bytes(range(16))
ABOUT = {"stem": "kernel", "key": KEY, "bytes": len(PAYLOAD)}
ENTRY = encode_entry(ABOUT, PAYLOAD)


@pytest.fixture
def cache(tmp_path) -> DiskCache:
    return DiskCache(str(tmp_path / "made" / "when needed"))


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


@pytest.mark.parametrize("payload", [None, b"", b"\n", b"\0" * 5, b"a\nb\n"], ids=repr)
def test_what_was_put_is_got_until_it_is_replaced(cache, payload, rng):
    payload = rng.bytes(100_000) if payload is None else payload
    assert cache.get("kernel", KEY) is None
    for replacement in (payload, payload + b"other"):
        cache.put("kernel", KEY, replacement, {"symbol": "kernel"})
        assert cache.get("kernel", KEY) == DiskCache(cache.folder).get("kernel", KEY) == replacement
    assert cache.get("kernel", OTHER) is None and cache.get("other", KEY) is None
    assert len(os.listdir(cache.folder)) == 1


def test_a_person_can_read_what_an_entry_is(cache):
    cache.put("rms_norm_forward_bf16_h4096.sm_90", KEY, PAYLOAD, {"symbol": "rms_norm", "kind": "cubin"})
    (name,) = os.listdir(cache.folder)
    assert name == f"rms_norm_forward_bf16_h4096.sm_90.{KEY[:24]}"
    with open(os.path.join(cache.folder, name), "rb") as file:
        first, _, header, rest = file.read().split(b"\n", 3)
    assert first == b"transformer_rtc cache entry 2" and rest == PAYLOAD
    assert json.loads(header)["kind"] == "cubin" and json.loads(header)["bytes"] == len(PAYLOAD)


@pytest.mark.parametrize("stem", ["../../escape", "a/b", "a\0b", "x" * 4000, "", "ü\n"])
def test_a_stem_never_leaves_the_folder(cache, stem):
    cache.put(stem, KEY, PAYLOAD, {})
    assert cache.get(stem, KEY) == PAYLOAD
    (name,) = os.listdir(cache.folder)
    assert len(name) <= 120  # and what is written beside it has at most eCryptfs's 143


def entry_of(header: bytes) -> bytes:
    """Return an entry whose digest is right, whatever its header says."""
    content = header + b"\n" + PAYLOAD
    return b"transformer_rtc cache entry 2\n" + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


DAMAGED = {
    "a byte": [
        ENTRY[:place] + bytes([byte ^ flip]) + ENTRY[place + 1 :]
        for place, byte in enumerate(ENTRY)
        for flip in (0x01, 0x20, 0x80, 0xFF)
    ],
    "cut short": [ENTRY[:length] for length in range(len(ENTRY))],
    "longer": [ENTRY + b"\0"],
    "another key's": [encode_entry(ABOUT | {"key": OTHER}, PAYLOAD)],
    "foreign": [b"", b"garbage", b"\x7fELF" + bytes(100), b"transformer_rtc cache entry 2\n[]\n"],
    "a foreign header": [*map(entry_of, [b"no JSON", b"[]", b"{}", b"null", b'"key"', b"[" * 100_000])],
    "a header that lies": [
        encode_entry(ABOUT | lie, PAYLOAD) for lie in ({"bytes": 15}, {"bytes": "16"}, {"key": 1}, {"stem": None})
    ],
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_damaged_or_foreign_is_a_miss_that_the_next_write_replaces(cache, kind):
    cache.put("kernel", KEY, PAYLOAD, {})
    with open(cache.path("kernel", KEY), "rb") as file:
        assert file.read() == ENTRY and parse_entry(ENTRY) == (ABOUT, PAYLOAD)
    for data in DAMAGED[kind]:
        write(cache.path("kernel", KEY), data)
        assert cache.get("kernel", KEY) is None, data
        assert parse_entry(data) is None or kind == "another key's", data
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


@pytest.mark.parametrize("below", ["/dev/null/x", "file/x", "file"])
def test_a_folder_that_cannot_be_made_costs_one_warning_and_never_the_call(below, tmp_path):
    # Root may write anywhere: a folder below a file is what nobody can make.
    (tmp_path / "file").write_bytes(b"")
    unwritable = DiskCache(os.path.join(tmp_path, below))
    with pytest.warns(RuntimeWarning, match="TRANSFORMER_RTC_CACHE_DIR") as caught:
        for number in range(3):
            unwritable.put(f"kernel{number}", KEY, PAYLOAD, {})
            assert unwritable.get(f"kernel{number}", KEY) is None
    assert len(caught) == 1 and unwritable.size() == (0, 0)


def test_a_write_that_fails_leaves_no_file_behind(cache, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    cache.put("kernel", KEY, PAYLOAD, {})
    before = os.listdir(cache.folder)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.put("kernel", OTHER, PAYLOAD, {})
    assert os.listdir(cache.folder) == before
    assert cache.get("kernel", KEY) == PAYLOAD  # reading goes on


def test_a_folder_in_an_entrys_place_costs_a_warning(cache):
    os.makedirs(cache.path("kernel", KEY))
    assert cache.get("kernel", KEY) is None
    with pytest.warns(RuntimeWarning):
        cache.put("kernel", KEY, PAYLOAD, {})
    assert os.listdir(cache.folder) == [os.path.basename(cache.path("kernel", KEY))]


@pytest.mark.filterwarnings("error")
def test_no_folder_keeps_nothing_and_says_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = DiskCache(None)
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) is None and cache.size() == (0, 0) and os.listdir(tmp_path) == []


def test_the_size_counts_entries_and_not_what_is_being_written(cache):
    cache.put("kernel", KEY, PAYLOAD, {})
    write(cache.path("kernel", OTHER) + ".1.abcd.tmp", b"half")
    assert cache.size() == (1, len(ENTRY))


@pytest.mark.parametrize("together", [in_threads, in_processes])
def test_many_writers_and_readers_of_one_entry_see_all_of_it_or_nothing(cache, together):
    payloads = [bytes([number]) * 200_000 for number in range(8)]

    def work(i):
        for _ in range(20):
            if i < 8:
                cache.put("kernel", KEY, payloads[i], {})
            found = cache.get("kernel", KEY)
            assert found in payloads or (found is None and i >= 8)

    assert not any(together(12, work))
    assert cache.get("kernel", KEY) in payloads and len(os.listdir(cache.folder)) == 1


def test_a_digest_depends_on_every_part_and_not_on_their_order():
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    different = [
        {"a": 1}, {"a": "1"}, {"a": 1, "b": 2}, {"b": 1}, {"a": [1]}, {"a": {"1": 1}}, {"a": "12"}, {"a": ["1", "2"]},
    ]  # fmt: skip
    assert len({digest(parts) for parts in different}) == len(different)
