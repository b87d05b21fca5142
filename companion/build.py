# SPDX-License-Identifier: Apache-2.0
"""Build the companion wheel, transformer-rtc-kernels: the kernels of well-known models, compiled.

    python companion/build.py                       # all of kernels.jsonl, for five architectures: minutes on two cores
    python companion/build.py --models llama-3.1-8b --architectures sm_90 -o wheels

It needs NVRTC, and no GPU. With --models it also needs torch and transformers, as make_list.py does.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from models import MODELS

from transformer_rtc import archive, manifest, progress
from transformer_rtc.cache import DiskCache
from transformer_rtc.companion import INDEX, MANIFEST, PACK, PACKAGE
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.manifest import ManifestEntry
from transformer_rtc.spec import ARCHITECTURES, STATIC_ARCHITECTURES
from transformer_rtc.version import __version__
from transformer_rtc.warming import WarmupRecord, compile_all, kernels_of, record_line

LIST = Path(__file__).with_name(MANIFEST)
LICENSE = Path(__file__).parents[1] / "LICENSE"
_NAMES = {f"sm_{architecture}": limits for architecture, limits in ARCHITECTURES.items()}
_DEFAULT = [f"sm_{architecture}" for architecture in STATIC_ARCHITECTURES]


def asked(models: Sequence[str]) -> list[ManifestEntry]:
    """Return what the models ask for; of none, what the list has."""
    if not models:
        return manifest.read(LIST)
    from make_list import asked_by_model, lines

    return list(map(manifest.parse, lines(entry for name in models for entry in asked_by_model(MODELS[name]))))


def packs(entries: Sequence[ManifestEntry], architectures: Sequence[str], threads: int) -> dict[str, bytes]:
    """Return the pack and the index of each architecture, by their names."""
    tasks = {
        name: list({(spec, limits.architecture): None for entry in entries for spec in kernels_of(entry, limits)})
        for name, limits in _NAMES.items()
        if name in architectures
    }
    show, total = progress.shown("kernel", record_line), sum(map(len, tasks.values()))
    before, found = 0, {}

    def tell(record: WarmupRecord, done: int, _: int) -> None:
        show(record, before + done, total)

    for name, kernels in tasks.items():
        with tempfile.TemporaryDirectory() as folder:
            cache, path = DiskCache(os.path.join(folder, "cache")), os.path.join(folder, PACK.format(name))
            for record in compile_all(KernelManager(cache), kernels, threads, tell):
                if record.error:
                    sys.exit(f"{record_line(record)}: {record.error}")
            packed, _ = archive.pack(cache, path)
            if len(packed) != len(kernels):
                sys.exit(f"{len(kernels)} kernels for {name}, and {len(packed)} in the pack: is the disk full?")
            found[PACK.format(name)] = Path(path).read_bytes()
            found[INDEX.format(name)] = archive.index(path)
        before += len(kernels)
    return found


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """Write a wheel of a package with such files, and return its path."""
    about = f"{PACKAGE}-{__version__}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: {PACKAGE.replace('_', '-')}\nVersion: {__version__}\n"
        f"Summary: Compiled kernels of transformer_rtc {__version__} for well-known models\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\n"
    )
    wheel = "Wheel-Version: 1.0\nGenerator: transformer_rtc\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {
        f"{PACKAGE}/__init__.py": f'"""Compiled kernels, which transformer_rtc {__version__} finds here."""\n'.encode(),
        **{f"{PACKAGE}/{name}": data for name, data in files.items()},
        f"{about}/licenses/LICENSE": LICENSE.read_bytes(),
        f"{about}/METADATA": metadata.encode(),
        f"{about}/WHEEL": wheel.encode(),
    }
    record = f"{about}/RECORD"
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in content.items()]
    content[record] = "".join(f"{row}\n" for row in [*rows, f"{record},,"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, data in content.items():
            # Of one date, so that the same kernels make the same file.
            member = zipfile.ZipInfo(name)
            member.external_attr, member.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            file.writestr(member, data, compresslevel=9)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheel transformer-rtc-kernels.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[], metavar="MODEL", help="by default, all")
    parser.add_argument("--architectures", nargs="+", choices=_NAMES, default=_DEFAULT, metavar="SM")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compiles at a time")
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"), metavar="FOLDER")
    given = parser.parse_args()
    start = time.perf_counter()
    entries = asked(given.models)
    files = packs(entries, given.architectures, given.threads)
    files[MANIFEST] = "".join(f"{manifest.line(entry)}\n" for entry in entries).encode()
    path = write_wheel(given.output, files)
    print(f"{path}: {path.stat().st_size} bytes, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
