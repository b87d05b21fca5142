"""Compile the general kernels into the package: build_static.py NATIVE_MODULE FOLDER. Run by CMake."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    native, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    # The module that was just built; nothing is installed yet.
    spec = importlib.util.spec_from_file_location("transformer_rtc._native", native)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["transformer_rtc._native"] = module
    spec.loader.exec_module(module)

    from transformer_rtc import compiler, sources, static
    from transformer_rtc.dispatch import Family, operators
    from transformer_rtc.spec import ARCHITECTURES

    families = {operator.family.name: operator.family for operator in operators().values()}
    targets = [(family, architecture, "cubin") for family in families.values() for architecture in ARCHITECTURES]
    targets += [(family, static.PTX_ARCHITECTURE, "ptx") for family in families.values()]

    def build(target: tuple[Family, int, str]) -> dict[str, object]:
        family, architecture, kind = target
        program = family.static_program()
        start = time.perf_counter()
        compiled = compiler.compile_program(
            f"static_{family.name}", program, sources.included(program), (), architecture, ptx=kind == "ptx"
        )
        name = static.file_name(family.name, architecture, kind)
        (folder / name).write_bytes(compiled.image)
        return {
            "file": name,
            "family": family.name,
            "bytes": len(compiled.image),
            "seconds": round(time.perf_counter() - start, 3),
            "compiler": compiled.compiler,
        }

    folder.mkdir(parents=True)
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(build, targets))
    manifest = {"seconds": round(time.perf_counter() - start, 3), "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


main()
