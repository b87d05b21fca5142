# SPDX-License-Identifier: Apache-2.0
"""Where a kernel's machine code is looked for before it is compiled, and under which key.

First what this compiler made, in the cache's folders; then what another one made of the same source: in the read-only
folder, which an image brings, and in the companion wheel. In the user's own folder an entry of another compiler is a
miss: who installs a new NVRTC gets what that compiles.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from . import compiler, includes, sources
from .cache import DiskCache, digest
from .cache_entry import sha256
from .errors import CompilerNotFoundError
from .spec import KernelSpec, Target
from .toolchain import Toolchain, toolchain_of

__all__ = ["Image", "Lookup"]


def _key(source: str, identity: str) -> str:
    return digest({"source": source, "compiler": identity}) if identity else source


class Image(NamedTuple):
    """What can be loaded.

    Attributes
    ----------
    data : bytes
        The machine code, or PTX.
    kind : str
        ``"cubin"``, ``"ptx"`` or ``"module"``.
    origin : str
        As an event tells it.
    by_another : bool
        Whether another compiler may have made it, whose code the driver may be too old for.
    """

    data: bytes
    kind: str
    origin: str
    by_another: bool = False


class Lookup:
    """Finds machine code.

    Parameters
    ----------
    cache : DiskCache
        Its folders, and the companion wheel.
    nvrtc : Toolchain
        What compiles for GPUs.
    uses_others : bool
        Whether what another compiler made of the same source is used, of the read-only folder and the companion wheel.
        The user's own folder is used without a compiler, too.
    """

    def __init__(self, cache: DiskCache, nvrtc: Toolchain, uses_others: bool) -> None:
        self.cache = cache
        self._nvrtc = nvrtc
        self._uses_others = uses_others
        self._reads_others = uses_others
        self._refused: set[str] = set()  # digests of what the driver took not

    def key(self, spec: KernelSpec, target: Target, identity: str) -> str:
        """Return a kernel's key; of no compiler, that of its source."""
        parts: dict[str, object] = {
            "program": spec.program,
            "headers": {name: sources.fingerprint(text) for name, text in includes.headers_of(spec).items()},
            "options": [*compiler.OPTIONS, *spec.options],
            "architecture": target.architecture,
            **toolchain_of(target, self._nvrtc).key_parts(target),
        }
        return _key(digest(parts), identity)

    def read(self, spec: KernelSpec, target: Target) -> tuple[Image | None, str]:
        """Return what is on disk, and the key under which it was looked for.

        Raises
        ------
        CompilerNotFoundError
            If there is nothing, and no compiler that could make it.
        """
        stem, source = f"{spec.symbol}.{target}", self.key(spec, target, "")
        toolchain = toolchain_of(target, self._nvrtc)
        try:
            identity, missing = toolchain.identity(), None
        except CompilerNotFoundError as error:
            # It cannot be compiled here: what any compiler made is right too.
            identity, missing = "", error
        key = _key(source, identity)
        found = self.cache.get(stem, key) if identity else None
        if found is not None:
            return Image(found, toolchain.kind_of(found), "disk"), key
        own, others = missing is not None, self._reads_others and (missing or toolchain.takes_others)
        if own or others:
            found = self.cache.get_any(stem, source, own, bool(others), self._refused)
            if found is not None:
                return Image(found, toolchain.kind_of(found), "disk", True), key
        companion = self.cache.companion
        if companion is not None:
            found = companion.get(str(target), source, None if self._uses_others else identity)
            if found is not None:
                return Image(found, toolchain.kind_of(found), "companion", True), key
        if missing is not None:
            raise missing
        return None, key

    def refuse(self, image: Image) -> None:
        """Use an image no more that the driver refused.

        Nor the companion wheel, and where there is a compiler, what others made: a driver that is too old for one
        kernel refuses the others, too.
        """
        self._refused.add(sha256(image.data))
        if image.origin == "companion":
            self.cache.companion = None
        else:
            with contextlib.suppress(CompilerNotFoundError):  # without one there is nothing but these
                self._nvrtc.identity()
                self._reads_others = False

    def miss(self, spec: KernelSpec, target: Target, key: str) -> tuple[str, str]:
        """Return where a kernel is missing and under which key, and why in a few words: what is there instead."""
        shipped = self.cache.read_only
        folders = {"the cache": self.cache.folder, "the read-only cache": shipped.path if shipped else None}
        where = " and ".join(f"{name} {folder}" for name, folder in folders.items() if folder is not None)
        told = f"{spec.symbol} for {target} is not in {where or 'a cache, as there is none,'} under the key {key}"
        about = self.cache.abouts(f"{spec.symbol}.{target}")
        source, identity = self.key(spec, target, ""), toolchain_of(target, self._nvrtc).identity()
        others = sorted({str(one.get("compiler")) for one in about if one.get("source") == source})
        if others:
            reason = f"it was compiled there by {', '.join(others)}, and this compiler is {identity}"
        elif about:
            reason = "what has its name there was made of another text, headers or options"
        else:
            return told, "it is in no cache"
        return f"{told}: {reason}", reason
