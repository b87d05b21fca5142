# SPDX-License-Identifier: Apache-2.0
"""Compile the general kernels into the package. Run by CMake, before there is a native module.

``plan FOLDER BUILT`` writes the programs, removes what was compiled from others, and prints the files of `FOLDER` that
there are to be; ``compile FOLDER FILE`` makes one of them; ``manifest FOLDER`` tells of all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]

# The package without its __init__: that needs what is not built yet.
_package = ModuleType("transformer_rtc")
_package.__path__ = [str(_PACKAGE)]
sys.modules["transformer_rtc"] = _package

from transformer_rtc import compiler, sources  # noqa: E402


def _say(line: str) -> None:
    """Write to the terminal, if there is one: pip shows nothing of a build."""
    with contextlib.suppress(OSError), open("/dev/tty", "w", encoding="utf-8") as terminal:
        terminal.write(f"\r\033[Ktransformer_rtc: {line}\n")  # in the place of pip's spinner


def _record(folder: Path, file: str) -> dict[str, Any]:
    """Return what is known of a file that was compiled, or nothing."""
    try:
        found = json.loads((folder / f"{file}.json").read_text()) if (folder / file).exists() else {}
    except (OSError, ValueError):
        return {}
    assert isinstance(found, dict)
    return found


def plan(folder: Path, built: Path) -> None:
    """Find out what is to be compiled."""
    from unittest.mock import MagicMock

    # The native module is built meanwhile, and numpy is no requirement of a build: no program's text needs either.
    sys.modules["transformer_rtc._native"] = _package._native = MagicMock(__file__="")  # type: ignore[attr-defined]
    sys.modules["numpy"] = MagicMock()

    from transformer_rtc import static
    from transformer_rtc.declaration import declarations
    from transformer_rtc.spec import STATIC_ARCHITECTURES

    for api in sorted(_PACKAGE.glob("ops/*/api.py")):  # which declare what there is
        import_module(f"transformer_rtc.ops.{api.parent.name}.api")
    folder.mkdir(parents=True, exist_ok=True)
    built.mkdir(parents=True, exist_ok=True)
    targets = [(architecture, "cubin") for architecture in STATIC_ARCHITECTURES] + [(static.PTX_ARCHITECTURE, "ptx")]
    planned: dict[str, dict[str, Any]] = {}
    # Options that only the compile itself knows.
    compiled_by = [Path(file).read_text() for file in (__file__, compiler.__file__)]
    for name, family in sorted({one.family.name: one.family for one in declarations().values()}.items()):
        program = family.static_program()
        assert "Mock" not in program
        ptx = static.file_name(name, static.PTX_ARCHITECTURE, "ptx")
        for architecture, kind in targets:
            made_of = [program, sources.included(program), compiler.OPTIONS, architecture, kind]
            made_of += [compiler.compiler_identity(), compiled_by]
            planned[static.file_name(name, architecture, kind)] = {
                "family": name,
                "architecture": architecture,
                "kind": kind,
                # Comes with the cubin of its architecture.
                "ptx": ptx if kind == "cubin" and architecture == static.PTX_ARCHITECTURE else None,
                "program": program,
                "digest": hashlib.sha256(json.dumps(made_of).encode()).hexdigest(),
            }
    before = folder / "plan.json"
    if before.exists():
        for file in json.loads(before.read_text()).keys() - planned.keys():
            for gone in (folder / f"{file}.json", folder / file, built / file, built / "manifest.json"):
                gone.unlink(missing_ok=True)
    before.write_text(json.dumps(planned))
    missing = [file for file, target in planned.items() if _record(folder, file).get("digest") != target["digest"]]
    for file in missing:
        for gone in (folder / f"{file}.json", folder / file, built / file):
            gone.unlink(missing_ok=True)
    print(";".join(planned), end="")
    if missing:
        _say(f"{len(missing)} of {len(planned)} static kernels are to be compiled, beside the native modules")


def compile_one(folder: Path, file: str) -> None:
    """Compile a file, and with the cubin that comes with PTX that, too."""
    planned = json.loads((folder / "plan.json").read_text())
    target = planned[file]
    if _record(folder, file).get("digest") == target["digest"]:
        return
    program = target["program"]
    start, start_cpu = time.perf_counter(), time.process_time()
    compiled = compiler.compile_program(
        f"static_{target['family']}",
        program,
        sources.included(program),
        (),
        target["architecture"],
        ptx=target["kind"] == "ptx",
        keep_ptx=target["ptx"] is not None,
    )
    images = {file: compiled.image}
    if target["ptx"] is not None:
        images[target["ptx"]] = compiled.ptx
    for name, image in images.items():
        (folder / f"{name}.json").unlink(missing_ok=True)  # the record last: with it, the file is whole
        (folder / name).write_bytes(image)
        record = {
            "file": name,
            "family": target["family"],
            "bytes": len(image),
            "seconds": round(time.process_time() - start_cpu, 3) if name == file else 0.0,
            "compiler": compiled.compiler,
            "digest": planned[name]["digest"],
        }
        (folder / f"{name}.json").write_text(json.dumps(record) + "\n")
    done = sum(_record(folder, other).get("digest") == planned[other]["digest"] for other in planned)
    _say(f"{done} of {len(planned)} static kernels: {file}, {time.perf_counter() - start:.0f} s")


def write_manifest(folder: Path) -> None:
    files = [_record(folder, file) for file in json.loads((folder / "plan.json").read_text())]
    for file in files:
        del file["digest"]
    seconds = round(sum(file["seconds"] for file in files), 3)
    (folder / "manifest.json").write_text(json.dumps({"seconds": seconds, "files": files}, indent=1) + "\n")


def main() -> None:
    step, folder = sys.argv[1], Path(sys.argv[2])
    if step == "plan":
        plan(folder, Path(sys.argv[3]))
    elif step == "compile":
        compile_one(folder, sys.argv[3])
    else:
        write_manifest(folder)


main()
