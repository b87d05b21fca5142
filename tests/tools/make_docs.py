# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/ that the code owns, between the comments that name them. Run it after a change of one."""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformer_rtc import cli_parser, settings, spec

DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"(<!-- from the code: ([\w ]+) -->)\n.*?(<!-- end -->)", re.DOTALL)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command's name and its parser, those of `cache` as commands of two words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, made in action.choices.items():
                below = list(_commands(made))
                yield from [(f"{name} {action}", one) for action, one in below] or [(name, made)]


def _options(parser: argparse.ArgumentParser) -> str:
    """Return the table of what a command takes."""
    rows = []
    # What has no name comes first, and what every command has last.
    for action in sorted(parser._actions, key=lambda one: (bool(one.option_strings), one.dest == "json")):
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or action.dest.upper() if action.nargs != 0 else ""
        many = {"+": f"{value} ...", "*": f"{value} ..."}.get(str(action.nargs), str(value))
        name = f"{action.option_strings[-1]} {many}".strip() if action.option_strings else action.metavar or action.dest
        name += " ..." if not action.option_strings and action.nargs == "*" else ""
        rows.append(
            (f"`{name}`", str(action.help) + (" (required)" if action.option_strings and action.required else ""))
        )
    return _table(("argument", "what it is"), rows)


def tables() -> dict[str, str]:
    """Return the tables that pages have, by their names."""
    commands = dict(_commands(cli_parser.parser(defaultdict(lambda: None))))
    header = ("variable", "what it takes", "by default", "what it does")
    found = {
        name: _table(
            header,
            [(f"`{one.name.replace(', ', '`, `')}`", one.takes, one.default, one.text) for one in variables],
        )
        for name, variables in (("variables", settings.VARIABLES), ("other variables", settings.OTHERS))
    }
    found["exits"] = _table(("it exits with", "when"), [(str(code), told) for code, told in cli_parser.EXITS.items()])
    found["commands"] = _table(
        ("command", "what it does"),
        [(f"[`{name}`](#{name.replace(' ', '-')})", str(one.description)) for name, one in commands.items()],
    )
    found |= {f"options of {name}": _options(one) for name, one in commands.items()}
    rows = []
    for architecture in spec.ARCHITECTURES:
        first = spec.FIRST_NVRTC[architecture]
        of_extra = "any of the extras `cu12` and `cu13`" if first <= (12, 8) else f"{first[0]}.{first[1]} or later"
        rows.append((f"`sm_{architecture}`", f"{architecture / 10:.1f}", of_extra))
    found["architectures"] = _table(("architecture", "compute capability", "NVRTC"), rows)
    return found


def with_tables(page: str) -> str:
    """Return a page's text with the tables that it names."""
    known = tables()
    return TABLE.sub(lambda found: f"{found[1]}\n{known[found[2]]}\n{found[3]}", page)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = with_tables(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
