"""key -> bytes on disk. Knows no CUDA.

An entry is one file: a line that says what it is, the digest of the rest, a line of JSON that a person can read, and
the bytes. It is written
beside its final name and renamed, so that a reader sees all of it or nothing, and it is checked whenever it is read:
what is damaged, cut short or another key's is a miss, and the next write replaces it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping

_FORMAT = b"transformer_rtc cache entry 1\n"


def _sha256(content: bytes) -> str:
    import hashlib  # opens OpenSSL: not at import

    return hashlib.sha256(content).hexdigest()


def digest(parts: Mapping[str, object]) -> str:
    """Return the key of everything that an entry depends on: SHA-256 of its JSON, in hexadecimal."""
    return _sha256(json.dumps(parts, sort_keys=True).encode())


def _digest_line(content: bytes) -> bytes:
    return _sha256(content).encode() + b"\n"


class DiskCache:
    """Entries in one folder, which is made when the first one is written.

    Parameters
    ----------
    folder : str or None
        None keeps nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self._writable = folder is not None

    def path(self, stem: str, key: str) -> str:
        """Return where an entry lies: its stem, for people, and the start of its key."""
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", stem)[:120]
        return os.path.join(self.folder or "", f"{readable}.{key[:24]}")

    def get(self, stem: str, key: str) -> bytes | None:
        """Return an entry's bytes, or None."""
        if self.folder is None:
            return None
        try:
            with open(self.path(stem, key), "rb") as file:
                if file.readline() != _FORMAT:
                    return None
                expected = file.readline()
                content = file.read()
        except OSError:
            return None
        if expected != _digest_line(content):
            return None
        header, _, payload = content.partition(b"\n")
        try:
            return payload if json.loads(header)["key"] == key else None
        except (ValueError, KeyError, TypeError):
            return None

    def put(self, stem: str, key: str, payload: bytes, about: Mapping[str, object]) -> None:
        """Write an entry. A folder that cannot be made or written costs one warning, and no more is written.

        Parameters
        ----------
        stem, key : str
            As for `get`.
        payload : bytes
            The entry.
        about : mapping
            What a person may want to know of it.
        """
        if not self._writable or self.folder is None:
            return
        content = json.dumps({**about, "key": key, "bytes": len(payload)}).encode() + b"\n" + payload
        path = self.path(stem, key)
        beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            try:
                with open(beside, "xb") as file:
                    file.write(_FORMAT + _digest_line(content) + content)
                os.replace(beside, path)
            except OSError:
                if os.path.exists(beside):
                    os.unlink(beside)
                raise
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"transformer_rtc cannot write its kernel cache, and compiles again in each process: {error}. Set "
                f"TRANSFORMER_RTC_CACHE_DIR to a folder that can be written, or to nothing to do without",
                RuntimeWarning,
                stacklevel=2,
            )

    def size(self) -> tuple[int, int]:
        """Return how many entries there are, and their bytes."""
        try:
            with os.scandir(self.folder or "") as found:
                sizes = [entry.stat().st_size for entry in found if not entry.name.endswith(".tmp")]
        except OSError:
            return 0, 0
        return len(sizes), sum(sizes)
