"""Writes the stubs of the families' public functions, which are made of declarations: run it after a change of one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import transformer_rtc
from transformer_rtc.function import stub
from transformer_rtc.request import declarations

OPS = Path(__file__).parents[2] / "transformer_rtc" / "ops"


def stubs() -> dict[Path, str]:
    """Return the text of each stub by its file."""
    found = {}
    for api in sorted(OPS.glob("*/api.py")):
        module = import_module(f"transformer_rtc.ops.{api.parent.name}.api")
        of_module = [declarations()[name] for name in module.__all__ if name in declarations()]
        found[api.with_suffix(".pyi")] = stub(of_module)
    return found


if __name__ == "__main__":
    assert transformer_rtc
    for path, text in stubs().items():
        path.write_text(text)
        print(path)
