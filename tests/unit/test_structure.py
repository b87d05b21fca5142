# SPDX-License-Identifier: Apache-2.0
"""What the modules of the package know of each other, read from their text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "transformer_rtc"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "build_static.py"  # a program of the build
}
# Functions that are written by a program.
LONG = {"ops/activation/api.py", "ops/norm/api.py", "ops/norm/api.pyi", "ops/softmax/api.pyi"}
MOST_LINES = 500


def imported(name: str, path: Path) -> Iterator[str]:
    """Yield the modules of the package that a module imports, anywhere in its text."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = f"{base}.{node.module}" if node.module else base
            for alias in node.names:
                if f"{module}.{alias.name}" in MODULES:
                    yield f"{module}.{alias.name}"
                elif node.module:  # else it is a native module
                    yield module


def test_no_modules_import_each_other_in_a_circle():
    left = {name: set(imported(name, path)) - {name} for name, path in MODULES.items()}
    assert sum(map(len, left.values())) > 200
    while True:
        leaves = {name for name, others in left.items() if not others & left.keys()}
        if not leaves:
            break
        left = {name: others for name, others in left.items() if name not in leaves}
    assert not left


def text_of(path: Path) -> str:
    """Return a file's code, without comments and documentation."""
    if path.suffix != ".py":
        return re.sub(r"//[^\n]*", "", path.read_text())
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        match node:  # of a module, a class, a function, or the variable before it
            case ast.Expr(ast.Constant(str())):
                node.value = ast.Constant(...)
    return ast.unparse(tree)


def test_only_devices_ask_whether_one_is_simulated():
    asks = re.compile(r"isinstance\([^()]*(?:\([^()]*\)[^()]*)*\bSimulated\w+")
    found = {path.relative_to(PACKAGE).as_posix() for path in MODULES.values() if asks.search(text_of(path))}
    assert found == {"device.py"}
    # Others use what these say.
    says = re.compile(r"\bis_simulated\(|\.simulated\b(?! import)")
    asking = {path.relative_to(PACKAGE).as_posix() for path in MODULES.values() if says.search(text_of(path))}
    assert {name for name in asking if not name.startswith("simulator/")} == {
        "device.py",  # has is_simulated()
        "select.py",  # what using() is given
        "spec.py",  # a target's name
        "toolchain.py",  # which compiler makes code for a target
    }


FAMILY_WORDS = {
    "softmax",
    "norm",
    "norms",
    "rms",
    "layernorm",
    "weight",
    "bias",
    "dweight",
    "dbias",
    "residual",
    "dresidual",
    "rstd",
    "mask",
    "sink",
    "dmask",
    "dsink",
    "lse",
    "causal",
    "window",
    "queries",
    "keys",
}
# Those that users are offered as examples, and the names of the functions that there are; and torch's modules.
FRONT = {"__init__.py", "cli.py", "cli_parser.py", "demo.py", "demo_cases.py", "native/build_static.py"}
# Modules of torch are of families, and so is what swaps them.
OF_FAMILIES = {
    f"torch/{name}.py"
    for name in (
        "__init__",
        "formulas",
        "hugging_face",
        "megatron",
        "modules",
        "patching",
        "scale_mask_softmax",
        "softmax_module",
        "sum_modules",
        "transformer_engine",
        "warming",
    )
}


def generic() -> list[Path]:
    files = [
        *PACKAGE.glob("*.py"),
        *PACKAGE.glob("arrays/*.py"),
        *PACKAGE.glob("torch/*.py"),
        *PACKAGE.glob("native/*.?pp"),
    ]
    return [path for path in files if path.relative_to(PACKAGE).as_posix() not in FRONT | OF_FAMILIES]


@pytest.mark.parametrize("path", generic(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_generic_layer_knows_no_family(path):
    # A method of mappings, an argument of json, and what numpy's masked arrays and array interface have.
    others = r"\.keys\(\)|sort_keys|have no mask|no mask; they are|get\(.mask.\)"
    text = re.sub(others, "", text_of(path))
    assert not FAMILY_WORDS & {part.lower() for part in re.findall(r"[A-Za-z]+", text)}


def test_files_are_short():
    suffixes = {".py", ".pyi", ".cpp", ".hpp", ".h"}
    lengths = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*")
        if path.suffix in suffixes
    }
    assert {name for name, lines in lengths.items() if lines > MOST_LINES} == LONG


def test_every_source_file_names_its_license():
    root = PACKAGE.parent
    folders = ("transformer_rtc", "headers", "kernel_sources", "companion", "benchmarks", "tests", "examples", "docs")
    kinds = (".py", ".pyi", ".cu", ".cuh", ".cpp", ".hpp", ".h")
    files = [file for folder in folders for file in (root / folder).rglob("*") if file.suffix in kinds]
    assert len(files) > 100
    nameless = [file for file in files if "SPDX-License-Identifier: Apache-2.0" not in file.read_text()[:200]]
    assert not nameless
