# SPDX-License-Identifier: Apache-2.0
"""Every mutant of a CUDA text: the text with one place changed, so that the change is likely a fault."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple


class Token(NamedTuple):
    kind: str  # "name", "number", "string", "mark" or "directive"
    text: str
    start: int
    end: int


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    what: str
    original: str
    mutated: str
    text: str  # the whole file


_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?\*/|\\\n)"
    r"|(?P<directive>\#[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')'
    r"|(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|\d+\.\d*f?|\d+[uUlL]*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark><<=|>>=|\+\+|--|->|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|::|\.\.\.|.)",
    re.DOTALL,
)
# By what an operator is replaced. The sources are formatted: an operator of two operands has spaces around it, which
# brackets of templates, references and pointers have not.
_OPERATORS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "&&": ("||",),
    "||": ("&&",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("/=",),
    "/=": ("*=",),
}
_WORDS = {"true": "false", "false": "true", "min": "max", "max": "min"}
# Calls whose first two arguments may change places.
_COMMUTATIVE = {"min", "max", "multiply_high", "fused_multiply_add"}
_NO_CALL = {"if", "while", "for", "switch", "return", "sizeof", "alignof", "defined", "static_assert", "constexpr"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# They end the compile or change nothing: what they hold is not for the simulator to see.
_NO_STATEMENT = {"using", "static_assert", "typedef", "namespace", "template", "friend"}


def tokens_of(text: str, offset: int = 0) -> list[Token]:
    found = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        assert kind is not None
        if kind != "skip":
            found.append(Token(kind, match[0], match.start() + offset, match.end() + offset))
        if kind == "directive" and (inner := re.match(r"#\s*(if|elif|define\s+\w+(\([^)]*\))?)\s", match[0])):
            # Conditions and macros are code; other directives are not.
            found += tokens_of(match[0][inner.end() :], match.start() + inner.end() + offset)
    return found


class Text:
    """A file, and where its mutable code is."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tokens = tokens_of(text)
        self.matches: dict[int, int] = {}
        opened: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.kind == "mark" and token.text in _PAIRS:
                opened.append(i)
            elif token.kind == "mark" and token.text in _PAIRS.values():
                self.matches[opened.pop()] = i
        assert not opened, f"{name} has brackets without a partner"
        # Text of PTX, which the simulator does not see, and assertions of the compiler's.
        self.excluded: set[int] = set()
        for i, token in enumerate(self.tokens):
            if token.text in ("TRTC_PTX", "static_assert", "asm") and i + 1 in self.matches:
                self.excluded.update(range(i, self.matches[i + 1] + 1))

    def _make(self, what: str, start: int, end: int, new: str) -> Mutant:
        old = self.text[start:end]
        new += "\n" * (old.count("\n") - new.count("\n"))  # lines keep their numbers
        text = self.text[:start] + new + self.text[end:]
        line = self.text.count("\n", 0, start)
        last = self.text.count("\n", 0, end)
        before, after = (" ".join(" ".join(t.split("\n")[line : last + 1]).split()) for t in (self.text, text))
        return Mutant(self.name, line + 1, what, before, after, text)

    def mutants(self) -> Iterator[Mutant]:
        """Yield every mutant of the file once."""
        seen = {self.text}
        for made in (self._statements(), self._tokens(), self._conditions(), self._calls()):
            for mutant in made:
                if mutant.text not in seen:
                    seen.add(mutant.text)
                    yield mutant

    def _statements(self) -> Iterator[Mutant]:
        first, i = 0, 0
        # What TRTC_PORTABLE holds is statements.
        blocks = {i + 1 for i, token in enumerate(self.tokens) if token.text == "TRTC_PORTABLE"}
        ends = {self.matches[i] for i in blocks if i in self.matches}
        while i < len(self.tokens):
            token = self.tokens[i]
            if token.kind == "directive" or i in ends or i in self.excluded:
                first = i + 1
                while token.kind == "directive" and first < len(self.tokens) and self.tokens[first].end <= token.end:
                    first += 1
                i = max(i, first - 1)
            elif token.text == "{":
                if i > first and self.tokens[i - 1].text in ("=", "return"):
                    i = self.matches[i]
                else:
                    first = i + 1
            elif token.text == "}" or i in blocks:
                first = i + 1
            elif token.text in ("(", "["):
                i = self.matches[i]
            elif token.text == ";":
                if i > first and self.tokens[first].text not in _NO_STATEMENT:
                    yield self._make("statement removed", self.tokens[first].start, token.end, ";")
                first = i + 1
            i += 1

    def _spaced(self, token: Token) -> bool:
        return self.text[token.start - 1].isspace() and self.text[token.end].isspace()

    def _tokens(self) -> Iterator[Mutant]:
        for i, token in enumerate(self.tokens):
            if i in self.excluded:
                continue
            before = self.tokens[i - 1].text if i > 0 else ""
            if token.kind == "mark" and token.text in _OPERATORS and self._spaced(token):
                for other in _OPERATORS[token.text]:
                    yield self._make(f"{token.text} -> {other}", token.start, token.end, other)
            elif token.kind == "mark" and token.text in ("++", "--"):
                yield self._make(f"{token.text} reversed", token.start, token.end, "--" if token.text == "++" else "++")
            elif token.kind == "mark" and token.text == "!" and before != "#":
                yield self._make("! removed", token.start, token.end, "")
            elif token.text == "-" and (before in ("(", ",", "=", "?", ":", "return")):
                yield self._make("sign removed", token.start, token.end, "")
            elif token.kind == "name" and token.text in _WORDS:
                other = _WORDS[token.text]
                yield self._make(f"{token.text} -> {other}", token.start, token.end, other)
            elif token.kind == "number":
                for new in self._numbers(token.text):
                    yield self._make(f"{token.text} -> {new}", token.start, token.end, new)

    @staticmethod
    def _numbers(text: str) -> list[str]:
        if "." in text:
            value = float(text.rstrip("f"))
            return [f"{other}f" for other in dict.fromkeys((value + 1, 0.0)) if other != value]
        digits = text.rstrip("uUlL")
        value, suffix = int(digits, 0), text[len(digits) :]
        others = dict.fromkeys((value + 1, *((value - 1, 0) if value > 0 else ())))
        return [(f"{other:#x}" if digits[:2] in ("0x", "0X") else str(other)) + suffix for other in others]

    def _conditions(self) -> Iterator[Mutant]:
        for i, token in enumerate(self.tokens):
            if i in self.excluded:
                continue
            if token.text in ("if", "while"):
                opening = i + 2 if self.tokens[i + 1].text == "constexpr" else i + 1
                start, end = self.tokens[opening].end, self.tokens[self.matches[opening]].start
                yield self._make("condition negated", start, end, f"!({self.text[start:end]})")
            elif token.text == "?":
                middle = end = self._end_of_arm(i + 1, ":")
                end = self._end_of_arm(middle + 1, None)
                first = self.text[token.end : self.tokens[middle].start].strip()
                second = self.text[self.tokens[middle].end : self.tokens[end].start].strip()
                yield self._make("arms swapped", token.end, self.tokens[end].start, f" ({second}) : ({first})")

    def _end_of_arm(self, i: int, colon: str | None) -> int:
        """Return the token that ends an arm of ``?:``: its colon, or what the whole expression ends with."""
        nested = 0
        while True:
            text = self.tokens[i].text
            if text in _PAIRS:
                i = self.matches[i]
            elif text == "?":
                nested += 1
            elif text == ":" and nested > 0:
                nested -= 1
            elif text == colon or text in (";", ",", ")", "]", "}", ":"):
                return i
            i += 1

    def _calls(self) -> Iterator[Mutant]:
        for i, token in enumerate(self.tokens):
            if token.text != "(" or i in self.excluded or i not in self.matches or i == 0:
                continue
            name = self._called(i)
            if name is None:
                continue
            arguments, start, j = [], token.end, i + 1
            while j <= self.matches[i]:
                text = self.tokens[j].text
                if j == self.matches[i] or text == ",":
                    arguments.append((start, self.tokens[j].start))
                    start = self.tokens[j].end
                elif text in _PAIRS:
                    j = self.matches[j]
                elif text == "<" and not self._spaced(self.tokens[j]):
                    j = self._end_of_brackets(j)
                j += 1
            for number, (a, b) in enumerate(itertools.pairwise(arguments)):
                if number == 0 and name in _COMMUTATIVE:
                    continue
                first, second = self.text[slice(*a)].strip(), self.text[slice(*b)].strip()
                if first != second:
                    yield self._make("arguments swapped", a[0], b[1], f"{second}, {first}")

    def _called(self, opening: int) -> str | None:
        """Return what a bracket calls; None where it is no call: a declaration, a condition."""
        i = opening - 1
        if self.tokens[i].text in (">", ">>"):
            depth = 0
            while i > 0:
                depth += {">": 1, ">>": 2, "<": -1}.get(self.tokens[i].text, 0)
                i -= 1
                if depth == 0:
                    break
        name, before = self.tokens[i], self.tokens[i - 1]
        if name.kind != "name" or name.text in _NO_CALL or name.text.startswith("TRTC_"):
            return None
        if before.kind == "name" and before.text not in ("return", "else", "constexpr"):
            return None
        if before.text in (">", "&", "*") and not self._spaced(before):
            return None  # a type before a declaration's name
        return name.text

    def _end_of_brackets(self, i: int) -> int:
        depth = 0
        while True:
            depth += {"<": 1, ">": -1, ">>": -2}.get(self.tokens[i].text, 0)
            if depth <= 0:
                return i
            i += 1
