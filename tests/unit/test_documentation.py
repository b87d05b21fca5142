# SPDX-License-Identifier: Apache-2.0
"""The documentation: its sentences, the modules that it names, and what it quotes of the package."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import make_docs
import pytest

from transformer_rtc import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *PAGES, ROOT / "benchmarks" / "README.md"]
MOST_WORDS = 35  # of a sentence
HOLE = "\0"  # what a message has of values


def texts_of_python(source: str) -> list[str]:
    """Return the strings of a module, with a hole for each value that is formatted into one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def texts_of_cpp(source: str) -> list[str]:
    """Return the strings of a file, those as one that are added up or follow each other, with a hole between them."""
    string = r'"(?:[^"\\\n]|\\.)*"'
    joined = re.sub(r'"\s+"', "", source)
    statements = joined.split(";\n")
    return [
        HOLE.join(found[1:-1].replace('\\"', '"') for found in re.findall(string, statement))
        for statement in statements
    ]


class Texts:
    """What the package's sources say, and whether a text can be put together from it."""

    def __init__(self) -> None:
        package = ROOT / "transformer_rtc"
        found = [text for path in package.rglob("*.py") for text in texts_of_python(path.read_text(encoding="utf-8"))]
        found += [text for path in package.rglob("*.cpp") for text in texts_of_cpp(path.read_text(encoding="utf-8"))]
        self._all = "\n".join(found)
        # Where a message is put together of several, it may be cut into few of these, and into long parts of others.
        self._pieces = {piece for text in found if HOLE in text for piece in text.split(HOLE) if len(piece) > 1}

    def say(self, part: str) -> bool:
        if part in self._all:
            return True
        starts = {0}
        for _ in range(4):
            starts = {end for start in starts for end in self._ends(part, start)}
        return len(part) in starts

    def _ends(self, part: str, start: int) -> set[int]:
        """Return where a piece ends that starts there: of a message, or of at least ten characters of any text."""
        ends = {end for end in range(start + 2, min(start + 10, len(part) + 1)) if part[start:end] in self._pieces}
        low, high = start, len(part)  # the text is there up to low
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if part[start:middle] in self._all else (low, middle - 1)
        return ends | set(range(max(start + 10, low - 9), low + 1)) | ({start} if start == len(part) else set())


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def messages() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
            for line in block.splitlines()]  # fmt: skip


def parts_that_none_says(message: str, texts: Texts) -> list[str]:
    return [part for part in message.split("...") if not (texts.say(part) or texts.say(part.strip()))]


@pytest.mark.parametrize("message", messages())
def test_messages_of_the_troubleshooting_page_are_the_packages(message, texts):
    assert parts_that_none_says(message, texts) == []
    assert max(len(part.strip()) for part in message.split("...")) > 7 or message == "... is ...; it takes ..."


def test_a_message_that_nothing_says_would_be_noticed(texts):
    assert len(messages()) > 30
    for message in messages():
        longest = max(message.split("..."), key=len)
        assert parts_that_none_says(message.replace(longest, longest[:-3] + "zq"), texts)


def commands() -> list[str]:
    """Return the commands in the pages' shell blocks."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```(?:sh|dockerfile)\b[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += re.findall(r"^(?:RUN )?(?:[A-Z_]+=\S+ +)*(transformer-rtc .*)$", block, re.MULTILINE)
    return found


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_commands_of_the_pages_are_taken(command):
    assert callable(cli._parser().parse_args(shlex.split(command, comments=True)[1:]).run)


def test_each_command_has_an_example():
    def names(parser, before=""):
        actions = [action for action in parser._actions if action.dest in ("command", "action")]
        below = [names(made, f"{before}{name} ") for action in actions for name, made in action.choices.items()]
        return [name for found in below for name in found] or [before.strip()]

    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name in names(cli._parser()):
        assert f"\n## {name}\n" in page and f"\ntransformer-rtc {name}" in page and f"options of {name} -->" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_say_what_the_code_says(page):
    text = page.read_text(encoding="utf-8")
    assert text == make_docs.with_tables(text), "run tests/tools/make_docs.py"


def test_every_command_has_a_table_of_its_options():
    there = {name for page in PAGES for _, name, _ in make_docs.TABLE.findall(page.read_text(encoding="utf-8"))}
    assert there == make_docs.tables().keys()


def paragraphs_of(page: str) -> list[str]:
    """Return a page's paragraphs and items of lists, without code, tables and headings; a link is its words."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->|^ *(?:#+ |\|).*?$", "\n", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)]


def sentences_of(page: str) -> list[str]:
    ends = r"(?<=[.!?])(?:\*\*)?\s+(?=\W*[A-Z])|(?<=[.!?])(?:\*\*)?\s+(?=`)"
    return [sentence for part in paragraphs_of(page) for sentence in re.split(ends, part) if sentence]


def too_long(page: str) -> list[str]:
    return [sentence for sentence in sentences_of(page) if len(sentence.split()) > MOST_WORDS]


@pytest.mark.parametrize("path", EVERY_PAGE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_is_long(path):
    page = path.read_text(encoding="utf-8")
    assert len(sentences_of(page)) > 3
    assert too_long(page) == []


def test_a_long_sentence_would_be_noticed():
    words = " ".join(["word"] * MOST_WORDS)
    long = [f"# Title\n\nOne more {words}.\n", f"- One.\n- More\n  {words}, `code`.\n", f"1. A [b](c) {words}."]
    assert [len(too_long(page)) for page in long] == [1, 1, 1]
    short = [f"```sh\n{words} more\n```\n\n{words}.", f"| {words} b |\n", f"{words}. One more.\n\n- {words}\n- More\n"]
    assert [too_long(page) for page in short] == [[], [], []]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_by_what_it_is_for(path):
    assert re.match(r"# [^\n]+\n\nThis page ", path.read_text(encoding="utf-8"))


def test_the_page_of_modules_names_all():
    page = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    package = ROOT / "transformer_rtc"
    files = [path for suffix in ("py", "cpp") for path in package.rglob(f"*.{suffix}") if path.name != "__init__.py"]
    assert len(files) > 100
    assert sorted({path.name for path in files if not re.search(rf"[`/]{re.escape(path.name)}`", page)}) == []
