# SPDX-License-Identifier: Apache-2.0
"""An entry of the cache as a file: its name, and its content.

An entry is one file: a line that says what it is, the digest of the rest, a line of JSON that a person can read, and
the bytes. What is damaged or cut short is no entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["ENTRY_NAME", "TEMPORARY_NAME", "Entry", "encode_entry", "name_of", "name_start", "parse_entry", "sha256"]

_FORMAT = b"transformer_rtc cache entry 2\n"
# Not compiled here, but where they are first used.
ENTRY_NAME = r"[^/]+\.[0-9a-f]{24}"
TEMPORARY_NAME = r"[^/]+\.[0-9a-f]{24}\.\d+\.[0-9a-f]{8}\.tmp"
_KEY = r"[0-9a-f]{64}"
# An entry's name has at most 120 characters, so that the temporary one, of up to 21 more, has no more than the 143 that
# eCryptfs takes.
_MOST_STEM, _DIGITS = 95, 24


def sha256(content: bytes) -> str:
    """Return SHA-256 of bytes, in hexadecimal."""
    import hashlib  # opens OpenSSL: not at import

    return hashlib.sha256(content).hexdigest()


def encode_entry(about: Mapping[str, object], payload: bytes) -> bytes:
    """Return an entry's file."""
    content = json.dumps(about).encode() + b"\n" + payload
    return _FORMAT + sha256(content).encode() + b"\n" + content


def parse_entry(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Return what an entry's file says of itself, and its bytes; None where it is no entry or damaged."""
    start = len(_FORMAT)
    if not data.startswith(_FORMAT) or data[start + 64 : start + 65] != b"\n":
        return None
    content = data[start + 65 :]
    if data[start : start + 64] != sha256(content).encode():
        return None
    header, _, payload = content.partition(b"\n")
    try:
        about = json.loads(header)
        whole = isinstance(about["stem"], str) and re.fullmatch(_KEY, about["key"]) and about["bytes"] == len(payload)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (about, payload) if whole else None


class Entry(NamedTuple):
    """An entry, as its file tells.

    Attributes
    ----------
    name : str
        Of the file.
    bytes : int
        Of the file.
    used : float
        When it was written, or last read give or take a minute; seconds since 1970.
    about : dict or None
        What it is, such as its ``"symbol"`` and ``"target"``. None: it is damaged, or cannot be read.
    """

    name: str
    bytes: int
    used: float
    about: dict[str, Any] | None


def name_start(stem: str) -> str:
    """Return how the names of a stem's entries start; 24 digits of a key follow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem)[:_MOST_STEM] + "."


def name_of(stem: str, key: str) -> str:
    """Return the name of an entry's file: its stem, for people, and the start of its key."""
    return name_start(stem) + key[:_DIGITS]
