# SPDX-License-Identifier: Apache-2.0
"""The Python examples in docs/: those of a page run in one process, on the CPU, in the simulator.

A fence that begins with ```python and one of the words below is left out. Examples say "cuda", and run on "cpu" here.
A line `print(...)  # text` must print that text.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest

ROOT = Path(__file__).parents[2]
# What the machine of a block left out needs: a GPU, or a package that is no part of the tests.
WORDS = ("gpu", "package")

FENCE = re.compile(r"^ *```python([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of Python."""

    word: str
    line: int  # of the page, where its code begins
    code: str


def blocks_of(text: str) -> list[Block]:
    return [
        Block(found[1].strip(), 1 + text.count("\n", 0, found.start(2)), textwrap.dedent(found[2]))
        for found in FENCE.finditer(text)
    ]


def pages() -> dict[str, list[Block]]:
    """Return the pages that have Python, by their names."""
    found = {path.name: blocks_of(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("docs/*.md"))}
    return {name: blocks for name, blocks in found.items() if blocks}


PAGES = pages()


def script_of(page: str, blocks: list[Block]) -> str:
    """Return a program that runs blocks in one namespace; its errors name lines of the page."""
    codes = ["\n" * (block.line - 1) + block.code.replace('"cuda"', '"cpu"') for block in blocks]
    runs = [f"exec(compile({code!r}, 'docs/{page}', 'exec'), names)" for code in codes]
    return "\n".join(["names = {'__name__': '__main__'}", *runs])


def imported_by(block: Block) -> set[str]:
    """Return the packages that a block imports."""
    found = set()
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def run(page: str, blocks: list[Block], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    # As torchrun starts the one process of a job.
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return subprocess.run(
        [sys.executable, "-c", script_of(page, blocks)],
        env=processes.environment(**processes.shared(tmp_path), SIMULATE="1") | job | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )


def fault_of(done: subprocess.CompletedProcess[str], blocks: list[Block]) -> str:
    """Return what was wrong with a run of blocks; an empty text where nothing was."""
    wanted = [text for block in blocks for text in PRINTED.findall(block.code)]
    found = done.stdout.splitlines()
    rest = iter(found)  # in which they come in their order, between what other lines print
    if done.returncode == 0 and not all(text in rest for text in wanted):
        return f"they print {found} and should print {wanted}"
    return done.stderr if done.returncode else ""


def test_a_block_is_left_out_by_a_known_word_alone():
    assert {block.word for blocks in PAGES.values() for block in blocks} <= {"", *WORDS}


def cases() -> list[Any]:
    """Return the pages to run; inductor compiles for 10 seconds."""
    slow = {name for name in PAGES if any("torch.compile" in block.code for block in PAGES[name])}
    return [pytest.param(name, marks=[pytest.mark.thorough] if name in slow else []) for name in PAGES]


@pytest.mark.parametrize("page", cases())
def test_the_examples_of_a_page_run(page, tmp_path):
    blocks = [block for block in PAGES[page] if not block.word]
    missing = {name for block in blocks for name in imported_by(block) if importlib.util.find_spec(name) is None}
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} is not installed")
    fault = fault_of(run(page, blocks, tmp_path), blocks)
    assert not fault, fault


TEXT = """one

```python
x = 1
```

```python gpu
1 / 0
```

- two

  ```python
  print(x)  # 1

  x / y
  ```
"""


@pytest.mark.parametrize(
    ("x", "y", "fault"),
    [("1", "2", ""), ("1", "0", 'docs/page.md", line 16'), ("3", "2", "['3'] and should print ['1']")],
)
def test_what_an_example_does_wrong_is_told(x, y, fault, tmp_path):
    first, left_out, last = blocks_of(TEXT.replace("x = 1", f"x = {x}").replace("/ y", f"/ {y}"))
    assert left_out.word == "gpu"
    found = fault_of(run("page.md", [first, last], tmp_path), [first, last])
    assert fault in found and bool(fault) == bool(found)
