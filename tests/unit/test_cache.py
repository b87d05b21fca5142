from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings

import pytest

from transformer_rtc.cache import DiskCache, digest

KEY = digest({"a": 1})
OTHER = digest({"a": 2})
PAYLOAD = bytes(range(16))


@pytest.fixture
def cache(tmp_path) -> DiskCache:
    return DiskCache(str(tmp_path / "made" / "when needed"))


def test_what_was_put_is_got(cache, rng):
    payload = rng.bytes(100_000)
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", KEY, payload, {"symbol": "kernel"})
    assert cache.get("kernel", KEY) == payload
    assert cache.get("kernel", OTHER) is None and cache.get("other", KEY) is None
    assert DiskCache(cache.folder).get("kernel", KEY) == payload


@pytest.mark.parametrize("payload", [b"", b"\n", b"\0" * 5, b"a\nb\n"])
def test_any_bytes_are_kept(cache, payload):
    cache.put("kernel", KEY, payload, {})
    assert cache.get("kernel", KEY) == payload


def test_an_entry_is_replaced(cache):
    for payload in (b"first", b"second"):
        cache.put("kernel", KEY, payload, {})
    assert cache.get("kernel", KEY) == b"second"
    assert len(os.listdir(cache.folder)) == 1


def test_a_person_can_read_what_an_entry_is(cache):
    cache.put(
        "rms_norm_forward_bf16_h4096.sm_90", KEY, PAYLOAD, {"symbol": "rms_norm_forward_bf16_h4096", "kind": "cubin"}
    )
    (name,) = os.listdir(cache.folder)
    assert name.startswith("rms_norm_forward_bf16_h4096.sm_90.") and name.endswith(KEY[:24])
    with open(os.path.join(cache.folder, name), "rb") as file:
        first, _, header, rest = file.read().split(b"\n", 3)
    assert first == b"transformer_rtc cache entry 2" and rest == PAYLOAD
    assert json.loads(header)["kind"] == "cubin" and json.loads(header)["bytes"] == len(PAYLOAD)


@pytest.mark.parametrize("stem", ["../../escape", "a/b", "a\0b", "x" * 4000, "", "ü\n"])
def test_a_stem_never_leaves_the_folder(cache, stem):
    cache.put(stem, KEY, PAYLOAD, {})
    assert cache.get(stem, KEY) == PAYLOAD
    assert len(os.listdir(cache.folder)) == 1


def damaged(entry: bytes):
    for position, byte in enumerate(entry):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            yield entry[:position] + bytes([byte ^ flip]) + entry[position + 1 :]


def put_and_read(cache: DiskCache) -> tuple[str, bytes]:
    cache.put("kernel", KEY, PAYLOAD, {"symbol": "kernel", "architecture": 90})
    path = cache.path("kernel", KEY)
    with open(path, "rb") as file:
        return path, file.read()


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def test_damage_of_any_byte_is_a_miss_that_the_next_write_replaces(cache):
    path, entry = put_and_read(cache)
    for data in (*damaged(entry), entry + b"\0"):
        write(path, data)
        assert cache.get("kernel", KEY) is None, data
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


def test_an_entry_cut_short_anywhere_is_a_miss_that_the_next_write_replaces(cache):
    path, entry = put_and_read(cache)
    for length in range(len(entry)):
        write(path, entry[:length])
        assert cache.get("kernel", KEY) is None, length
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


def test_another_keys_entry_under_this_ones_name_is_a_miss_that_the_next_write_replaces(cache):
    cache.put("kernel", OTHER, b"another", {})
    os.replace(cache.path("kernel", OTHER), cache.path("kernel", KEY))
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x7fELF" + bytes(100), b"transformer_rtc cache entry 2\n[]\n"])
def test_a_foreign_file_under_an_entrys_name_is_a_miss_that_the_next_write_replaces(cache, data):
    path, _ = put_and_read(cache)
    write(path, data)
    assert cache.get("kernel", KEY) is None
    cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) == PAYLOAD


@pytest.fixture(params=["/dev/null/x", "file/x", "file"])
def unwritable(request, tmp_path) -> DiskCache:
    # Root may write anywhere: a folder below a file is what nobody can make.
    (tmp_path / "file").write_bytes(b"")
    return DiskCache(os.path.join(tmp_path, request.param))


def test_a_folder_that_cannot_be_made_costs_one_warning_and_never_the_call(unwritable):
    with pytest.warns(RuntimeWarning, match="TRANSFORMER_RTC_CACHE_DIR") as caught:
        for number in range(3):
            unwritable.put(f"kernel{number}", KEY, PAYLOAD, {})
            assert unwritable.get(f"kernel{number}", KEY) is None
    assert len(caught) == 1
    assert unwritable.size() == (0, 0)


def test_a_write_that_fails_leaves_no_file_behind(cache, monkeypatch):
    cache.put("kernel", KEY, PAYLOAD, {})
    before = os.listdir(cache.folder)

    def fail(*_):
        raise OSError(28, "No space left on device")

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


def test_no_folder_keeps_nothing_and_says_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = DiskCache(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("kernel", KEY, PAYLOAD, {})
    assert cache.get("kernel", KEY) is None and cache.size() == (0, 0)
    assert os.listdir(tmp_path) == []


def test_the_size_counts_entries_and_not_what_is_being_written(cache):
    _, entry = put_and_read(cache)
    write(cache.path("kernel", OTHER) + ".1.abcd.tmp", b"half")
    assert cache.size() == (1, len(entry))


def test_many_writers_and_readers_of_one_entry_see_all_of_it_or_nothing(cache):
    payloads = {bytes([number]) * 200_000 for number in range(8)}
    seen, start = [], threading.Barrier(16)

    def write_many(payload):
        start.wait(30)
        for _ in range(20):
            cache.put("kernel", KEY, payload, {})

    def read_many():
        start.wait(30)
        for _ in range(40):
            seen.append(cache.get("kernel", KEY))

    threads = [threading.Thread(target=write_many, args=(payload,)) for payload in payloads]
    threads += [threading.Thread(target=read_many) for _ in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) <= payloads | {None} and seen[-1] is not None
    assert cache.get("kernel", KEY) in payloads and len(os.listdir(cache.folder)) == 1


def test_two_processes_share_a_folder(cache):
    script = (
        "import sys; from transformer_rtc.cache import DiskCache; cache = DiskCache(sys.argv[1])\n"
        "for i in range(200):\n"
        "    cache.put('kernel', sys.argv[2], sys.argv[3].encode() * 50_000, {})\n"
        "    found = cache.get('kernel', sys.argv[2])\n"
        "    assert found in (b'a' * 50_000, b'b' * 50_000), found\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, cache.folder, KEY, letter]) for letter in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    assert cache.get("kernel", KEY) in (b"a" * 50_000, b"b" * 50_000)
    assert len(os.listdir(cache.folder)) == 1


def test_a_digest_depends_on_every_part_and_not_on_their_order():
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    different = [
        {"a": 1},
        {"a": "1"},
        {"a": 1, "b": 2},
        {"b": 1},
        {"a": [1]},
        {"a": {"1": 1}},
        {"a": "12"},
        {"a": ["1", "2"]},
    ]
    assert len({digest(parts) for parts in different}) == len(different)


@pytest.mark.parametrize("header", [b"no JSON", b"[]", b"{}", b"null", b'"key"'])
def test_a_foreign_entry_with_a_right_digest_is_a_miss(cache, header):
    path = put_and_read(cache)[0]
    content = header + b"\npayload"
    write(path, b"transformer_rtc cache entry 2\n" + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    assert cache.get("kernel", KEY) is None
