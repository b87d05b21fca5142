"""Files of the cache, packs and manifests, damaged and made up: each is a miss, or refused by an error of ours.

``FUZZED_FILES=10000`` makes as many of each kind.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transformer_rtc import cli, manifest, packs
from transformer_rtc.cache import DiskCache, digest, encode_entry, parse_entry
from transformer_rtc.errors import ArgumentError, PackError
from transformer_rtc.manifest import ManifestEntry

FILES = settings(
    max_examples=int(os.environ.get("FUZZED_FILES", "1000")),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
STEM = "kernel.sm_90"
KEYS = [digest({"n": number}) for number in range(3)]
PAYLOADS = [b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + bytes([number]) * 40 for number in range(3)]
ENTRIES = [
    encode_entry(
        {"symbol": "kernel", "target": "sm_90", "compiler": "12.9", "source": digest({"source": 1}), "stem": STEM,
         "key": key, "bytes": len(payload)},
        payload,
    )
    for key, payload in zip(KEYS, PAYLOADS, strict=True)
]  # fmt: skip
PACK = b"transformer_rtc pack 1\n" + b"".join(b"%d\n%b" % (len(entry), entry) for entry in ENTRIES) + b"end\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@st.composite
def damaged(draw: st.DrawFn, good: bytes, others: list[bytes]) -> bytes:
    """Draw what a few accidents make of a file."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 80)))
        match draw(st.sampled_from(["flip", "cut", "delete", "repeat", "insert", "zero", "splice", "swap"])):
            case "flip" if start < len(data):
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[start:]
            case "delete":
                del data[start:end]
            case "repeat":
                data[end:end] = data[start:end]
            case "insert":
                data[start:start] = draw(st.binary(max_size=20))
            case "zero":
                data[start:end] = bytes(end - start)
            case "splice":
                data[start:] = draw(st.sampled_from(others))[start:]
            case "swap":
                data = bytearray(draw(st.sampled_from(others)))
    return bytes(data)


@FILES
@given(data=damaged(ENTRIES[0], ENTRIES[1:]))
def test_a_damaged_entry_is_a_miss(data, folder):
    cache = DiskCache(str(folder / "entries"))
    cache.put(STEM, KEYS[1], PAYLOADS[1], {})
    Path(cache.path(STEM, KEYS[0])).write_bytes(data)
    whole = data == ENTRIES[0]  # where one accident has undone another
    assert cache.get(STEM, KEYS[0]) == (PAYLOADS[0] if whole else None)
    assert cache.get_any(STEM, digest({"source": 1})) == (PAYLOADS[0] if whole else None)
    assert cache.get(STEM, KEYS[1]) == PAYLOADS[1]
    assert (parse_entry(data) in [parse_entry(entry) for entry in ENTRIES]) == (data in ENTRIES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@FILES
@given(data=st.data())
def test_an_entry_that_says_what_it_likes_is_another_keys_or_none(data, folder):
    about: Any = {"stem": STEM, "key": KEYS[0], "bytes": len(PAYLOADS[0]), "symbol": "kernel", "target": "sm_90"}
    for name in data.draw(st.lists(st.sampled_from([*about, "source", "compiler", "kind"]), min_size=1, max_size=3)):
        about[name] = data.draw(JSON)
    header = data.draw(st.sampled_from([json.dumps(about), json.dumps(about["key"]), "", "{", "[" * 10_000])).encode()
    content = header + b"\n" + PAYLOADS[0]
    text = b"transformer_rtc cache entry 2\n" + hashlib.sha256(content).hexdigest().encode() + b"\n" + content
    with tempfile.TemporaryDirectory(dir=folder) as made:
        cache = DiskCache(made)
        Path(cache.path(STEM, KEYS[1])).write_bytes(text)
        assert cache.get(STEM, KEYS[1]) == (PAYLOADS[0] if about["key"] == KEYS[1] and parse_entry(text) else None)
        cache.get_any(STEM, KEYS[1])
        names = cache.names()
        assert [entry.name for entry in cache.entries()] == names
        command = data.draw(
            st.sampled_from([["list"], ["list", "--json"], ["verify"], ["show", names[0]], ["pack", f"{made}/pack"]])
        )
        assert cli.main(["cache", *command, "--folder", made]) in (0, 1), command


def unpacked(folder: Path, data: bytes) -> tuple[PackError | None, set[str]]:
    """Return how it ended, and what lies there that was not there before."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        (Path(made) / "pack").write_bytes(data)
        error = None
        try:
            packs.unpack(DiskCache(f"{made}/a/b"), f"{made}/pack")
        except PackError as refused:
            error = refused
        return error, {str(path.relative_to(made)) for path in Path(made).rglob("*")} - {"pack"}


@FILES
@given(data=damaged(PACK, [PACK[::-1], PACK[40:], ENTRIES[0], b"\x1f\x8b" + PACK, b"PK\x03\x04" + PACK]))
def test_of_a_damaged_pack_nothing_is_unpacked(data, folder):
    error, there = unpacked(folder, data)
    whole = data in {
        b"transformer_rtc pack 1\n" + b"".join(b"%d\n%b" % (len(entry), entry) for entry in kept) + b"end\n"
        for kept in ((), ENTRIES, ENTRIES[:1], ENTRIES[:2])
    }
    assert (error is None) == whole
    assert whole or not there


NAMES = st.text(max_size=12) | st.sampled_from(
    [
        "../../escape",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        "a\0b",
        "x" * 5000,
        "locks/abc",
        "~",
        "\\",
        "-rf",
        "a\nb",
        "é",
    ]
)


@FILES
@given(stems=st.lists(NAMES, max_size=3), key=st.sampled_from(KEYS) | NAMES, size=st.none() | JSON)
def test_no_name_that_a_pack_makes_up_leaves_the_folder(stems, key, size, folder):
    made = [
        encode_entry({"stem": stem, "key": key, "bytes": len(PAYLOADS[0]) if size is None else size}, PAYLOADS[0])
        for stem in stems
    ]
    text = b"transformer_rtc pack 1\n" + b"".join(b"%d\n%b" % (len(entry), entry) for entry in made) + b"end\n"
    error, there = unpacked(folder, text)
    assert error is None or not there
    files = {path for path in there if path not in ("a", "a/b")}
    assert all(os.path.dirname(path) == "a/b" and path.endswith(key[:24]) for path in files)
    assert (error is None) == all(parse_entry(entry) is not None for entry in made)


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
        within: Any = entry
        place = draw(st.sampled_from([*entry, "more"]))
        inner = within.get(place)
        if isinstance(inner, dict) and draw(st.booleans()):
            within, place = inner, draw(st.sampled_from([*inner, "z"]))
        elif isinstance(inner, list) and inner and draw(st.booleans()):
            within, place = inner, 0
        within[place] = draw(JSON)
    text = json.dumps(entry)
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(st.text(max_size=3)) + text[start + draw(st.integers(0, 5)) :]
    return text


@FILES
@given(texts=st.lists(lines(), max_size=3), tail=st.binary(max_size=3))
def test_a_manifest_is_read_or_refused(texts, tail, folder):
    path = folder / "manifest.jsonl"
    path.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass") + b"\n" + tail)
    refuses: Callable[[str], bool] = lambda text: text.strip() and _refuses(text)  # noqa: E731
    try:
        entries = manifest.read(path)
    except ArgumentError as error:
        assert str(path) in str(error)
        return
    assert not any(map(refuses, texts))
    for entry in entries:
        assert isinstance(entry, ManifestEntry) and manifest.parse(manifest.line(entry)) == entry


def _refuses(text: str) -> bool:
    try:
        manifest.parse(text)
    except ArgumentError:
        return True
    return False
