# SPDX-License-Identifier: Apache-2.0
"""Files of the cache, packs and manifests, damaged and made up: each is a miss, or refused by an error of ours.

``FUZZED_FILES=10000`` makes as many of each kind in the thorough tests.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stubs import CUBIN, KEYS

from transformer_rtc import archive, cli, manifest
from transformer_rtc.cache import DiskCache, digest
from transformer_rtc.cache_entry import encode_entry, parse_entry
from transformer_rtc.errors import ArgumentError, PackError
from transformer_rtc.manifest import ManifestEntry

STEM, SOURCE = "kernel.sm_90", digest({"source": 1})
PAYLOADS = [CUBIN + bytes([number]) * 40 for number in range(3)]
ENTRIES = [
    encode_entry(
        {"symbol": "kernel", "target": "sm_90", "compiler": "12.9", "source": SOURCE, "stem": STEM, "key": key,
         "bytes": len(payload)},
        payload,
    )
    for key, payload in zip(KEYS, PAYLOADS, strict=False)
]  # fmt: skip


def pack_of(entries: list[bytes]) -> bytes:
    return b"transformer_rtc pack 1\n" + b"".join(b"%d\n%b" % (len(entry), entry) for entry in entries) + b"end\n"


PACK = pack_of(ENTRIES)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(params=["few", pytest.param("many", marks=pytest.mark.thorough)])
def fuzz(request) -> Callable[..., None]:
    """Return what runs a check of values that are drawn."""
    examples = 100 if request.param == "few" else int(os.environ.get("FUZZED_FILES", "1000"))

    def run(check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
        options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
        settings(max_examples=examples, **options)(given(**drawn)(check))()

    return run


def damaged(good: bytes, others: list[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a file of which something is cut out, put in, repeated, or another one's."""
    places, few = st.integers(0, len(good)), st.integers(0, 80)
    parts = st.binary(max_size=20) | st.builds(lambda at, size: good[at : at + size], places, few)
    parts |= st.sampled_from(others) | st.builds(lambda other, at: other[at:], st.sampled_from(others), places)
    return st.builds(lambda at, size, part: good[:at] + part + good[at + size :], places, few | places, parts)


def test_a_damaged_entry_is_a_miss(fuzz, tmp_path):
    cache = DiskCache(str(tmp_path))

    def check(data):
        cache.put(STEM, KEYS[1], PAYLOADS[1], {})
        Path(cache.path(STEM, KEYS[0])).write_bytes(data)
        expected = PAYLOADS[0] if data == ENTRIES[0] else None  # where one accident has undone another
        assert cache.get(STEM, KEYS[0]) == cache.get_any(STEM, SOURCE) == expected
        assert cache.get(STEM, KEYS[1]) == PAYLOADS[1]
        assert (parse_entry(data) in [parse_entry(entry) for entry in ENTRIES]) == (data in ENTRIES)

    fuzz(check, data=damaged(ENTRIES[0], ENTRIES[1:]))


def test_an_entry_that_says_what_it_likes_is_another_keys_or_none(fuzz, tmp_path):
    def check(data):
        about: Any = {"stem": STEM, "key": KEYS[0], "bytes": len(PAYLOADS[0]), "symbol": "kernel", "target": "sm_90"}
        places = st.sampled_from([*about, "source", "compiler", "kind"])
        for name in data.draw(st.lists(places, min_size=1, max_size=3)):
            about[name] = data.draw(JSON)
        header = data.draw(st.sampled_from([json.dumps(about), json.dumps(about["key"]), "", "{", "[" * 10_000]))
        content = header.encode() + b"\n" + PAYLOADS[0]
        text = b"transformer_rtc cache entry 2\n" + hashlib.sha256(content).hexdigest().encode() + b"\n" + content
        with tempfile.TemporaryDirectory(dir=tmp_path) as made:
            cache = DiskCache(made)
            Path(cache.path(STEM, KEYS[1])).write_bytes(text)
            expected = PAYLOADS[0] if about["key"] == KEYS[1] and parse_entry(text) else None
            assert cache.get(STEM, KEYS[1]) == expected
            cache.get_any(STEM, KEYS[1])
            names = cache.names()
            assert [entry.name for entry in cache.entries()] == names
            commands = [["list"], ["list", "--json"], ["verify"], ["show", names[0]], ["pack", f"{made}/pack"]]
            command = data.draw(st.sampled_from(commands))
            assert cli.main(["cache", *command, "--folder", made]) in (0, 1), command

    fuzz(check, data=st.data())


def unpacked(folder: Path, data: bytes) -> tuple[PackError | None, set[str]]:
    """Return how it ended, and what lies there that was not there before."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        (Path(made) / "pack").write_bytes(data)
        error = None
        try:
            archive.unpack(DiskCache(f"{made}/a/b"), f"{made}/pack")
        except PackError as refused:
            error = refused
        return error, {str(path.relative_to(made)) for path in Path(made).rglob("*")} - {"pack"}


def test_of_a_damaged_pack_nothing_is_unpacked(fuzz, tmp_path):
    empty, end = pack_of([]), b"end\n"
    head = empty.removesuffix(end)
    packed = [pack_of([entry]).removeprefix(head).removesuffix(end) for entry in ENTRIES]

    def is_whole(data):
        """Whether it is a pack of whole entries, of which one may be left out or repeated."""
        left = data.removeprefix(head)
        while part := next((one for one in packed if left.startswith(one)), None):
            left = left.removeprefix(part)
        return data.startswith(head) and left == end

    assert is_whole(PACK) and is_whole(empty) and not is_whole(PACK[:-1]) and not is_whole(PACK[1:])

    def check(data):
        error, there = unpacked(tmp_path, data)
        assert (error is None) == is_whole(data)
        assert is_whole(data) or not there

    others = [PACK[::-1], PACK[40:], ENTRIES[0], b"\x1f\x8b" + PACK, b"PK\x03\x04" + PACK]
    fuzz(check, data=damaged(PACK, others))


def test_no_name_that_a_pack_makes_up_leaves_the_folder(fuzz, tmp_path):
    def check(stems, key, size):
        size = len(PAYLOADS[0]) if size is None else size
        made = [encode_entry({"stem": stem, "key": key, "bytes": size}, PAYLOADS[0]) for stem in stems]
        error, there = unpacked(tmp_path, pack_of(made))
        assert error is None or not there
        files = {path for path in there if path not in ("a", "a/b")}
        assert all(os.path.dirname(path) == "a/b" and path.endswith(key[:24]) for path in files)
        assert (error is None) == all(parse_entry(entry) is not None for entry in made)
        assert error or bool(files) == bool(stems)

    bad = ["../../escape", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 5000, "locks/abc", "~", "\\", "a\nb", "é"]
    for name in bad:
        check([name], KEYS[0], None)
    names = st.text(max_size=12) | st.sampled_from(bad)
    fuzz(check, stems=st.lists(names, max_size=3), key=st.sampled_from(KEYS) | names, size=st.none() | JSON)


LINES: list[dict[str, Any]] = [
    {"operator": "rms_norm", "dtypes": {"x": "float32", "weight": "float16", "out": "float32"}, "columns": 8,
     "per_head": False, "margin": True},
    {"operator": "softmax", "dtypes": {"x": "bfloat16", "out": "bfloat16", "mask": "bool"}, "columns": 64,
     "per_head": False, "margin": False, "flags": ["causal", "mask_keeps"], "max_ctas_per_row": 4},
    {"kernel": "f", "text": "text", "fields": [["x", "pointer"]], "options": ["-G"]},
]  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> str:
    """Draw a line of a manifest, with something else in a place of it."""
    entry = copy.deepcopy(draw(st.sampled_from(LINES)))
    for _ in range(draw(st.integers(0, 2))):
        within, place = entry, draw(st.sampled_from([*entry, "more"]))
        if isinstance(entry.get(place), dict | list) and entry[place] and draw(st.booleans()):
            within = entry[place]
            place = draw(st.sampled_from([*within, "z"])) if isinstance(within, dict) else 0
        within[place] = draw(JSON)
    text = json.dumps(entry)
    return draw(st.just(text) | damaged(text.encode(), [b"{}"]).map(lambda data: data.decode("utf-8", "replace")))


def is_refused(text: str) -> bool:
    try:
        manifest.parse(text)
    except ArgumentError:
        return True
    return False


def test_a_manifest_is_read_or_refused(fuzz, tmp_path):
    path = tmp_path / "manifest.jsonl"

    def check(texts, tail):
        path.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass") + b"\n" + tail)
        try:
            entries = manifest.read(path)
        except ArgumentError as error:
            assert str(path) in str(error)
            return
        assert not any(is_refused(text) for text in texts if text.strip())
        for entry in entries:
            assert isinstance(entry, ManifestEntry) and manifest.parse(manifest.line(entry)) == entry

    fuzz(check, texts=st.lists(lines(), max_size=3), tail=st.binary(max_size=3))
