"""Breaks the kernel texts mechanically, and says which of the broken ones no check notices. Run by hand.

    python tests/mutate.py [--files norms.cu reduce.cuh] [--limit 100] [--seed 0] [--jobs 2] [--json mutants.json]

Each mutant differs from the sources in one place. It runs through a short suite in the simulator: checked mode with
threads first-in, then fast mode last-in; numbers against float64, and memory around the outputs. It is killed by the
first thing that goes wrong. One that no longer compiles is stillborn and does not count; neither does one whose text is
the same behind the preprocessor. A survivor wants to be read: it is equivalent, or visible only in speed, or a gap.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "simulator")]

import ml_dtypes  # noqa: E402, F401
import numpy as np  # noqa: E402
import reference  # noqa: E402
import test_conversions as conversions  # noqa: E402

from transformer_rtc import LaunchConfig, SimulatedDevice, sources  # noqa: E402
from transformer_rtc.errors import CompileError, LaunchError, SimulationError  # noqa: E402
from transformer_rtc.ops import norms  # noqa: E402
from transformer_rtc.ops.norms import NormConfig, NormSpec  # noqa: E402
from transformer_rtc.simulator import toolchain  # noqa: E402
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, DType, Field, Params  # noqa: E402

TIMEOUT = 60.0

# ---- Mutations -------------------------------------------------------------------------------------------------------


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


# ---- The suite: memory -----------------------------------------------------------------------------------------------


class Guarded:
    """Rows of any strides and alignment, in memory that must not change around them: all bits set, a NaN.

    Parameters
    ----------
    dtype : DType
        Of the elements.
    shape, strides : tuple of int
        (outer, inner, columns) and their strides in elements.
    offset : int
        Elements beyond an address that is aligned to 512 bytes.
    """

    GUARD = 512  # elements on either side, whole rows of a small shape

    def __init__(self, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> None:
        size = dtype.bytes
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
        self._memory = np.full((reach + offset + 2 * self.GUARD) * size + 512, 0xFF, np.uint8)
        start = -self._memory.ctypes.data % 512 + (self.GUARD + offset) * size
        self.bits = np.lib.stride_tricks.as_strided(
            self._memory[start:].view(np.uint8)[: reach * size].view(f"uint{8 * size}"),
            shape,
            tuple(stride * size for stride in strides),
        )
        self.array = self.bits.view(reference.NUMPY_TYPES[dtype])

    def assert_intact_around(self) -> None:
        """Check every byte that is not the rows'; what they held is lost."""
        self.bits[...] = np.iinfo(self.bits.dtype).max
        assert (self._memory == 0xFF).all(), "memory around the output was written"


class Layout(NamedTuple):
    """Where rows lie: `padding` elements between them, `offset` before the first; `heads` > 1: rows of a packed qkv."""

    offset: int = 0
    padding: int = 0
    heads: int = 1
    between: int = 0  # elements between the heads of two tokens
    aligned: bool = False  # every row to 16 elements

    def rows(self, dtype: DType, rows: int, columns: int) -> Guarded:
        inner = -(-columns // 16) * 16 if self.aligned else columns + self.padding
        outer = self.heads * inner + self.between
        assert rows % self.heads == 0
        return Guarded(dtype, (rows // self.heads, self.heads, columns), (outer, inner, 1), self.offset)


PLAIN = Layout()
ODD = Layout(1, 1)
ALIGNED = Layout(aligned=True)
QKV = Layout(8, 8, 3, 64)  # aligned to 16 bytes throughout, with two strides
QKV_ODD = Layout(0, 3, 5, 7)
IN_PLACE = Layout(-1)  # a mark: the output is the input


def divide_by(divisor: int) -> tuple[int, int]:
    """Return the factor and the shift with which a kernel divides by the number of heads."""
    shift = 0
    while 2 << shift < divisor:
        shift += 1
    return -(-(1 << (32 + shift)) // divisor), shift


def strides_of(name: str, rows: Guarded) -> dict[str, int]:
    outer, inner, _ = (stride // rows.array.itemsize for stride in rows.array.strides)
    heads = rows.array.shape[1]
    return {f"{name}_outer_stride": outer, f"{name}_inner_stride": inner if heads > 1 else 0}


# ---- The suite: kernels ----------------------------------------------------------------------------------------------

# What a result may be off, in ulp. Tighter than what the operator promises: rows are short here, and data are fixed.
MOST_ULPS = {FLOAT32: 2.25, FLOAT16: 0.51, BFLOAT16: 0.51}
MOST_ULPS_OF_RSTD = 1.45
EPS, WEIGHT_OFFSET = 1e-3, 0.25


@dataclass(frozen=True)
class Run:
    """A kernel, and rows for it. It is launched once for each pair of layouts, of x and of the output."""

    x: DType
    weight: DType | None
    out: DType
    rstd: bool
    hidden: int
    rows: int
    config: NormConfig | None  # None: the general kernel
    threads: tuple[int, int] = (1, 1)  # of the general kernel: of a row, and rows of a CTA
    groups: int = 2  # of CTAs that share rows, in a cooperative launch
    layouts: tuple[tuple[Layout, Layout], ...] = ((PLAIN, PLAIN),)
    eps: float = EPS
    most_ulps: float | None = None  # of float32, where rows are so short that it is the last rounding that counts

    @property
    def spec(self) -> NormSpec:
        assert self.config is not None
        return NormSpec("rms_norm_forward", self.x, self.weight, self.out, self.rstd, self.hidden, self.config)

    @property
    def symbol(self) -> str:
        if self.config is None:
            return f"general_{self.x.symbol}_{self.threads[0]}_{self.threads[1]}"
        return self.spec.symbol

    @property
    def params(self) -> Params:
        return norms._NormFamily._general_params if self.config is None else self.spec.params

    def text(self) -> str:
        """Return the kernel's part of a program of several."""
        if self.config is None:
            threads, rows = self.threads
            text = (
                f"{self.params.text('Params')}\nTRTC_ENTRY TRTC_LAUNCH_BOUNDS({threads * rows}) void {self.symbol}("
                f"TRTC_PARAMETER Params params) {{\n"
                f"  trtc::rms_norm_forward_rows<{self.x.text}, {threads}, {rows}>(params);\n}}\n"
            )
        else:
            text = self.spec.program.partition("\n\n")[2]
        return re.sub(r"\b(Params|Config)\b", rf"\1_{self.symbol}", text)

    def launches(self) -> Iterator[tuple[LaunchConfig, dict[str, Any], Any]]:
        """Yield launches: the configuration, the parameters, and what checks the result."""
        rng = np.random.default_rng(self.hidden * 1000 + self.rows)
        values = reference.random_rows(rng, (self.rows, self.hidden), self.x)
        if self.eps == 0.0:
            values[0] = 0  # rstd is infinite, and y is NaN
            values[1, -1] = np.inf  # rstd is 0
            values[2, 0] = np.nan
        weight = None if self.weight is None else reference.random_weight(rng, self.hidden, self.weight)
        if weight is not None and self.hidden > 5:
            weight[5] = np.inf
            if self.eps != 0.0:
                values[values == 0] = 1
        expected, expected_rstd = reference.rms_norm(values, weight, self.eps, WEIGHT_OFFSET)
        results: list[np.ndarray] = []
        for of_x, of_out in self.layouts:
            heads = of_x.heads
            x = of_x.rows(self.x, self.rows, self.hidden)
            x.array[...] = values.reshape(x.array.shape)
            out = x if of_out is IN_PLACE else of_out.rows(self.out, self.rows, self.hidden)
            rstd = Guarded(FLOAT32, (self.rows,), (1,))
            held = None
            if weight is not None:
                assert self.weight is not None
                held = Guarded(self.weight, (self.hidden,), (1,), max(of_out.offset, 0))
                held.array[...] = weight
                held.array.flags.writeable = False
            if out is not x:
                x.array.flags.writeable = False
            magic, shift = divide_by(heads) if heads > 1 else (0, 0)
            given: dict[str, Any] = {
                "x": self._bits(x),
                "out": self._bits(out),
                **strides_of("x", x),
                **strides_of("out", out),
                "rows": self.rows,
                "inner_count": heads,
                "inner_magic": magic,
                "inner_shift": shift,
                "eps": self.eps,
                "weight_offset": WEIGHT_OFFSET,
            }
            if self.rstd:
                given["rstd"] = rstd.array
            if held is not None:
                given["weight"] = self._bits(held)
            config = self._fill(given)

            def check(x: Guarded = x, out: Guarded = out, rstd: Guarded = rstd) -> None:
                y = np.array(out.array).reshape(expected.shape)
                self._compare(y, expected, self.out, self.most_ulps or MOST_ULPS[self.out], "y")
                if self.rstd:
                    self._compare(np.array(rstd.array), expected_rstd, FLOAT32, MOST_ULPS_OF_RSTD, "rstd")
                results.append(y)
                assert results[0].tobytes() == y.tobytes(), "bits depend on where rows lie"
                for written in (out, rstd):
                    written.assert_intact_around()

            yield config, given, check

    @staticmethod
    def _bits(rows: Guarded) -> np.ndarray:
        bits = rows.bits.view()
        bits.flags.writeable = rows.array.flags.writeable
        return bits

    @staticmethod
    def _compare(actual: np.ndarray, expected: np.ndarray, dtype: DType, most: float, what: str) -> None:
        error = reference.ulps(actual, expected, dtype)
        assert error.max() <= most, f"{what} is {error.max():.3f} ulp off"

    def _fill(self, given: dict[str, Any]) -> LaunchConfig:
        """Add what the kernel's launch needs to its parameters, and return it."""
        if self.config is None:
            threads, rows_per_cta = self.threads
            given.setdefault("rstd", 0)
            given.setdefault("weight", 0)
            given |= {
                "hidden": self.hidden,
                "weight_dtype": self.weight.id if self.weight else 0,
                "out_dtype": self.out.id,
            }
            return LaunchConfig((-(-self.rows // rows_per_cta), 1, 1), (threads * rows_per_cta, 1, 1))
        rule = self.spec.launch_rule
        groups = -(-self.rows // rule.rows_per_cta)
        cooperative = rule.workspace_bytes > 0
        if cooperative:
            groups = self.groups
            given["workspace"] = np.zeros(groups * rule.workspace_bytes // 4, np.uint32)
        return LaunchConfig(
            (groups * rule.ctas_per_row, 1, 1),
            (rule.threads, 1, 1),
            (rule.ctas_per_row if rule.clusters else 1, 1, 1),
            rule.dynamic_shared_memory,
            cooperative,
        )


class Conversion(NamedTuple):
    """A conversion of a format, on every value where rounding changes."""

    name: str
    helper: str
    widens: bool

    @property
    def symbol(self) -> str:
        return ("widen_" if self.widens else "narrow_") + re.sub(r"\W", "_", self.helper)

    @property
    def params(self) -> Params:
        return Params(conversions.FIELDS)

    def text(self) -> str:
        text = (conversions.WIDEN if self.widens else conversions.NARROW).partition("\n\n")[2]
        text = text.replace("HELPER", self.helper).replace("THREADS", str(conversions.THREADS))
        text = re.sub(r"\bvoid \w+", f"void {self.symbol}", text)
        return re.sub(r"\bParams\b", f"Params_{self.symbol}", self.params.text("Params") + text)

    def launches(self) -> Iterator[tuple[LaunchConfig, dict[str, Any], Any]]:
        form = conversions.FORMATS[self.name]
        config = LaunchConfig((conversions.CTAS, 1, 1), (conversions.THREADS, 1, 1))
        if self.widens:
            words = np.arange(1 << form.bits, dtype=np.uint32)
            if self.helper.startswith("float_from_half"):
                words |= words[::-1] << 16
            values = np.zeros(len(words), np.float32)
            expected = form.values(words & ((1 << form.bits) - 1))

            def check() -> None:
                nan = np.isnan(expected)
                assert (np.isnan(values) == nan).all(), "NaN"
                assert (values.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all(), "widened"

        else:
            low = _edges(self.name)
            high = low[::-1]
            values, words = np.stack([low, high], -1), np.full(len(low), 0xDEADBEEF, np.uint32)
            expected = form.rounded(low) | form.rounded(high) << form.bits

            def check() -> None:
                assert (words == expected).all(), "rounded"

        yield config, {"values": values, "words": words, "count": len(words)}, check


class Architecture(NamedTuple):
    """A kernel that tells which architecture it takes itself to be of."""

    expected: int
    symbol = "architecture"
    params = Params((Field("found", "pointer"),))

    def text(self) -> str:
        return (
            f"{self.params.text('Params_architecture')}\n"
            "TRTC_ENTRY void architecture(TRTC_PARAMETER Params_architecture params) {\n"
            "  *static_cast<int*>(params.found) = TRTC_ARCHITECTURE;\n}\n"
        )

    def launches(self) -> Iterator[tuple[LaunchConfig, dict[str, Any], Any]]:
        found = np.zeros(1, np.int32)

        def check() -> None:
            assert found[0] == self.expected, f"the architecture is {found[0]}"

        yield LaunchConfig((1, 1, 1), (1, 1, 1)), {"found": found}, check


@functools.cache
def _edges(name: str) -> np.ndarray:
    form = conversions.FORMATS[name]
    values = conversions.edges(form)
    structured = conversions.structured()
    if form.bits == 16:  # the first and the last ones, whole exponents between, NaN; the tests take all
        edges = np.abs(values)
        small, large = np.sort(np.unique(edges[np.isfinite(edges)]))[[2000, -2000]]
        values = values[(edges < small) | (edges > large) | ((edges >= 1) & (edges <= 2)) | ~np.isfinite(values)]
    return np.concatenate([values, structured[::7], structured[np.isnan(structured)][:64]])


class Program(NamedTuple):
    """Kernels that are compiled together."""

    name: str
    architecture: int
    runs: tuple[Any, ...]

    @property
    def text(self) -> str:
        header = "types.cuh" if isinstance(self.runs[0], Conversion) else "norms.cu"
        # An approximation that is as far off as the instruction's may be: 2 ulp.
        text = (
            "TRTC_INLINE float within_2_ulp(float value) {\n"
            "  const unsigned bits = __float_as_uint(rsqrtf(value));\n"
            "  return bits << 1 == 0 || bits << 1 == 0xff000000u ? rsqrtf(value)\n"
            "                                                    : __uint_as_float(bits + (bits % 2 == 0 ? 2 : -2));\n"
            f'}}\n#define rsqrtf within_2_ulp\n#include "{header}"\n\n'
        )
        texts = {run.symbol: run.text() for run in self.runs}
        return text + "\n".join(texts.values())


F32, F16, BF16 = FLOAT32, FLOAT16, BFLOAT16
APART = ((PLAIN, PLAIN), (ODD, ODD), (ALIGNED, ALIGNED))
SOME = (*APART, (PLAIN, IN_PLACE))
EACH = ((PLAIN, PLAIN), (ODD, PLAIN), (PLAIN, ODD), (QKV, QKV_ODD._replace(heads=3)), (QKV, PLAIN._replace(heads=3)))
HEADS = ((PLAIN, PLAIN), (QKV_ODD, QKV_ODD), (ODD, ODD))


def config(threads: int, rows: int, vector: int, steps: int, **others: Any) -> NormConfig:
    return NormConfig(threads, rows, vector, steps, **others)


def suite() -> tuple[Program, ...]:
    """Return the programs: every template and branch, at shapes where a wrong one shows."""
    cluster = {"clusters": True}
    shared = {"in_shared": True}
    return (
        Program("registers", 90, (
            Run(F32, F32, F32, True, 256, 6, config(32, 1, 4, 2), layouts=EACH),
            Run(BF16, None, BF16, False, 250, 3, config(32, 1, 8, 1), layouts=SOME),
            Run(F16, F32, F16, True, 1003, 2, config(64, 1, 8, 2), layouts=SOME),
        )),
        Program("narrow rows", 90, (
            Run(BF16, BF16, BF16, True, 24, 15, config(4, 8, 8, 1), layouts=HEADS),
            Run(F32, F16, F32, True, 13, 6, config(4, 4, 4, 1), layouts=SOME),
            Run(F16, F16, F16, False, 7, 6, config(8, 4, 1, 1), layouts=SOME),
            Run(BF16, F32, BF16, False, 3, 35, config(1, 32, 2, 2), layouts=SOME),
            Run(F32, F32, F32, False, 3, 35, config(1, 32, 4, 1), layouts=SOME),
            Run(F32, F32, F32, True, 1, 3, config(1, 32, 1, 1), eps=0.0),
            Run(F32, F32, F32, True, 8, 4, config(2, 16, 4, 1), eps=0.0),
            Run(F32, F32, F32, True, 2, 200, config(1, 32, 2, 1), most_ulps=1.02),
        )),
        Program("warps", 90, (
            Run(F32, F32, F32, True, 200, 5, config(64, 3, 4, 1), layouts=SOME),
            Run(F32, BF16, F32, False, 384, 3, config(96, 2, 4, 1), layouts=SOME),
            Run(BF16, BF16, BF16, False, 150, 2, config(160, 1, 1, 1)),
            Run(F32, F32, F32, False, 540, 2, config(544, 1, 1, 1)),
            Run(F32, F32, F32, False, 991, 2, config(992, 1, 1, 1)),
            Run(F16, None, F32, True, 570, 2, config(288, 1, 2, 1), layouts=APART),
        )),
        Program("chunks", 90, (
            Run(F32, F16, BF16, False, 701, 3, config(32, 1, 4, 2), layouts=APART),
            Run(F32, F32, F32, True, 1000, 3, config(32, 1, 4, 2), layouts=SOME),
            Run(F32, F32, F32, False, 500, 2, config(32, 1, 4, 2), layouts=SOME),
            Run(BF16, F32, BF16, False, 768, 2, config(32, 1, 8, 1), layouts=SOME),
        )),
        Program("large vectors", 90, (
            Run(BF16, F32, BF16, False, 1000, 2, config(32, 1, 8, 4), layouts=SOME),
            Run(BF16, BF16, F32, False, 497, 3, config(32, 1, 8, 2), layouts=APART),
            Run(F32, F32, F32, False, 10, 6, config(2, 8, 2, 3), layouts=SOME),
            Run(F16, F16, F16, False, 77, 5, config(4, 8, 16, 2), layouts=SOME),
        )),
        Program("in shared memory", 90, (
            Run(F32, F32, F32, True, 512, 3, config(64, 1, 4, 2, **shared), layouts=SOME),
            Run(BF16, F16, F32, False, 1021, 2, config(64, 1, 4, 8, **shared), layouts=APART),
            Run(F32, None, F16, False, 333, 2, config(32, 1, 4, 3, **shared), layouts=APART),
            Run(BF16, BF16, BF16, False, 1111, 2, config(32, 1, 8, 5, **shared), layouts=SOME),
        )),
        Program("clusters", 90, (
            Run(F32, F32, F32, True, 700, 3, config(32, 1, 4, 2, ctas_per_row=4, **cluster, **shared), layouts=SOME),
            Run(BF16, BF16, BF16, True, 5500, 2, config(32, 1, 8, 1, ctas_per_row=8, **cluster), layouts=SOME),
            Run(F16, F32, F32, False, 1501, 3, config(64, 1, 4, 3, ctas_per_row=2, **cluster, **shared),
                layouts=APART),
        )),
        Program("grids", 80, (
            Run(F32, F32, F32, True, 512, 7, config(64, 1, 4, 1, ctas_per_row=2, **shared), layouts=SOME),
            Run(BF16, BF16, BF16, True, 3001, 5, config(64, 1, 4, 1, ctas_per_row=4), groups=1, layouts=SOME),
            Run(F16, F16, F32, True, 4001, 5, config(64, 1, 4, 2, ctas_per_row=8, **shared), groups=3,
                layouts=APART),
        )),
        Program("a large grid", 90, (
            Run(F32, F32, F32, True, 3900, 3, config(64, 1, 1, 1, ctas_per_row=64), groups=1),
        )),
        Program("general", 90, (
            *(Run(F32, F32, F32, True, hidden, 9, None, (8, 4), layouts=SOME) for hidden in (2, 4, 7, 8, 37, 62)),
            Run(F32, BF16, F16, False, 2501, 3, None, (8, 4), layouts=APART),
            Run(F32, None, BF16, True, 3, 6, None, (8, 4), layouts=APART),
        )),
        Program("general, 16 bits", 80, (
            Run(BF16, F16, BF16, True, 999, 15, None, (64, 1), layouts=HEADS),
            *(Run(F16, F32, F32, True, hidden, 3, None, (32, 2), layouts=APART) for hidden in (2, 4, 7, 8, 9, 300)),
            Run(F16, F16, F16, False, 1, 3, None, (32, 2)),
            Run(F32, F32, F32, True, 2, 100, None, (32, 2), most_ulps=1.2),
            Run(F16, None, F32, True, 10, 3, None, (32, 2), eps=0.0),
            Architecture(80),
        )),
        Program("conversions", 90, tuple(
            Conversion(name, helper, widens)
            for widens, pairs in ((False, conversions.NARROWING), (True, conversions.WIDENING))
            for name, helper in pairs
        )),
    )  # fmt: skip


SUITE = {program.name: program for program in suite()}
MODES = {  # in this order: most go wrong in the first one
    "checked": SimulatedDevice(checked=True, order="first_in"),
    "fast": SimulatedDevice(order="last_in"),
}


def image_of(program: Program, mode: str, texts: dict[str, str]) -> bytes:
    device = replace(MODES[mode], architecture=program.architecture)
    text = program.text
    headers = {name: texts[name] for name in sources.included(text)}
    return toolchain.compile_program("suite", text, headers, (), device.target).image


def run(program: Program, mode: str, image: bytes) -> None:
    """Launch everything of a program, and check it."""
    from transformer_rtc.simulator.kernel import SimulatedKernel

    device = replace(MODES[mode], architecture=program.architecture)
    for one in program.runs:
        kernel = SimulatedKernel(one.symbol, one.params, device, image)
        for launch, given, check in one.launches():
            kernel.launch(launch, given)
            with np.errstate(all="ignore"):
                check()


# ---- Images ----------------------------------------------------------------------------------------------------------


def loaded_digest(image: bytes) -> str:
    """Return a digest of what of a module is loaded: its debug information, which knows columns, is not."""
    data = bytearray(image)
    offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    load, note = 1, 4
    digest = hashlib.sha256()
    for kind, _, start, _, _, length in segments:
        if kind == note:  # a digest of the whole file
            data[start : start + length] = bytes(length)
    for kind, _, start, _, _, length in segments:
        if kind == load:
            digest.update(data[max(start, 64) : start + length])  # without the header, which says where sections are
    return digest.hexdigest()


def lines_of(image: bytes) -> dict[str, list[int]]:
    """Return the lines that a module has code of, by file; nothing where there is no tool that tells."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(image)
        file.flush()
        try:
            text = subprocess.run(
                ["objdump", "--dwarf=decodedline", file.name], capture_output=True, text=True, check=False
            ).stdout
        except FileNotFoundError:
            return {}
    found: dict[str, set[int]] = collections.defaultdict(set)
    for name, line in re.findall(r"^(?:\S*/)?(\S+\.cuh?)\s+(\d+)\s+0x", text, re.MULTILINE):
        found[name].add(int(line))
    return {name: sorted(lines) for name, lines in found.items()}


def preprocessed(architecture: int, texts: dict[str, str]) -> str:
    """Return all the texts behind the preprocessor."""
    with tempfile.TemporaryDirectory() as folder:
        program = "".join(f'#include "{name}"\n' for name in sorted(texts))
        for name, text in {**texts, **toolchain._prelude(), "all.cu": program}.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        flags = ("-x", "c++", "-E", "-P", "-nostdinc", f"-D__CUDA_ARCH__={architecture}0", "-DTRTC_CHECKED=1")
        command = [*toolchain._command(), *flags, "-include", "prelude.h", "-I", ".", "all.cu"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


# ---- A worker: judges mutants in a process of its own, which may crash or hang ---------------------------------------


def judge(request: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
    """Return what became of a mutant: ``"same"``, ``"stillborn"``, ``"survived"``, or what killed it."""
    texts = {**original["texts"], request["file"]: request["text"]}
    unchanged: set[str] = set()
    for mode in MODES:
        for name in request["programs"]:
            if name in unchanged:
                continue
            where = f"{name}, {mode}"
            try:
                image = image_of(SUITE[name], mode, texts)
            except CompileError as error:
                return {"outcome": "stillborn", "detail": next(iter(re.findall("error: .*", error.log)), "")}
            if loaded_digest(image) == original["digests"][where]:
                if not unchanged and same_text(texts, original):
                    return {"outcome": "same", "detail": ""}
                unchanged.add(name)
                continue
            try:
                run(SUITE[name], mode, image)
            except SimulationError as error:
                return {"outcome": "checker", "detail": f"{where}: {error.kind}: {error.what}"}
            except (AssertionError, LaunchError) as error:
                return {"outcome": "numbers", "detail": f"{where}: {str(error).splitlines()[0]}"}
    same = len(unchanged) == len(request["programs"])
    return {"outcome": "survived", "detail": "the machine code is the same" if same else ""}


def same_text(texts: dict[str, str], original: dict[str, Any]) -> bool:
    """Whether texts are the original ones behind the preprocessor, on every architecture of the suite."""
    return all(preprocessed(architecture, texts) == text for architecture, text in original["preprocessed"].items())


def work() -> None:
    """Answer requests of the parent, a line of JSON each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what else is printed is no answer

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    original = json.loads(sys.stdin.readline())
    original["preprocessed"] = {
        architecture: preprocessed(architecture, original["texts"])
        for architecture in {program.architecture for program in SUITE.values()}
    }
    if original["digests"]:
        run(SUITE["narrow rows"], "checked", image_of(SUITE["narrow rows"], "checked", original["texts"]))
    answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "judge":
            try:
                answer(judge(request, original))
            except Exception as error:  # the script's own, or the library was changed meanwhile
                answer({"outcome": "error", "detail": repr(error)})
            continue
        program, mode = SUITE[request["program"]], request["mode"]
        image = image_of(program, mode, original["texts"])
        start = time.perf_counter()
        run(program, mode, image)
        seconds = time.perf_counter() - start
        answer({"digest": loaded_digest(image), "lines": lines_of(image), "seconds": seconds})


# ---- The parent ------------------------------------------------------------------------------------------------------


class Died(Exception):
    """A worker ended, or had to be."""


class Worker:
    """A process that judges mutants, replaced when it is gone."""

    MOST = 60  # mutants of one process: modules stay loaded

    def __init__(self, original: dict[str, Any], folder: str) -> None:
        self._original, self._folder = original, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = 0

    def _start(self) -> None:
        for attempt in range(8):
            self._process = subprocess.Popen(
                [sys.executable, os.path.realpath(__file__), "--worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                stderr=None if attempt == 7 else subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": self._folder},
            )  # fmt: skip
            self._answered = 0
            with contextlib.suppress(Died):
                assert self._send(self._original, TIMEOUT) == "ready"
                return
            time.sleep(5)  # the native modules may just be built anew
        raise RuntimeError("no worker starts: see its error above")

    def _send(self, value: Any, timeout: float) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise Died("timeout")
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except Died:
            self.end()
            raise
        if not line:
            code = process.wait()
            self.end()
            raise Died(f"crash: exit status {code}")
        return json.loads(line)

    def ask(self, value: Any, timeout: float = TIMEOUT) -> Any:
        if self._process is not None and self._answered >= self.MOST:
            self.end()
        if self._process is None:
            self._start()
        self._answered += 1
        return self._send(value, timeout)

    def end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its compiler too
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        self._process = None


KILLED = ("checker", "numbers", "timeout", "crash")


class Session:
    """All mutants of a run of this script."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.folder = tempfile.TemporaryDirectory(prefix="mutants.")
        self.original: dict[str, Any] = {"texts": sources.texts(), "digests": {}}
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.seconds: dict[str, float] = {}
        self.included = {name: set(sources.included(program.text)) for name, program in SUITE.items()}
        self._local = threading.local()
        self._workers: list[Worker] = []

    def _worker(self) -> Worker:
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker(self.original, self.folder.name)
            self._workers.append(self._local.worker)
        worker: Worker = self._local.worker
        return worker

    def measure(self) -> None:
        """Run the suite on the sources as they are: it must pass, and says which lines each program has code of."""
        digests = {}
        worker = Worker(self.original, self.folder.name)
        for name in SUITE:
            for mode in MODES:
                start = time.perf_counter()
                found = worker.ask({"do": "measure", "program": name, "mode": mode})
                digests[f"{name}, {mode}"] = found["digest"]
                if mode == "checked":
                    self.lines[name] = found["lines"]
                    self.seconds[name] = time.perf_counter() - start
                print(f"  {name}, {mode}: {time.perf_counter() - start:.2f} s, {found['seconds']:.2f} of them to run")
        worker.end()
        self.original["digests"] = digests

    def programs(self, mutant: Mutant) -> list[str]:
        """Return the programs that a mutant can be seen in: those with code of its line first, short ones first."""
        known = [name for name in SUITE if mutant.file in self.included[name]]
        return sorted(
            known, key=lambda name: (mutant.line not in self.lines[name].get(mutant.file, ()), self.seconds[name])
        )

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        request = {"do": "judge", "file": mutant.file, "text": mutant.text, "programs": self.programs(mutant)}
        start = time.perf_counter()
        found: dict[str, Any] = {}
        for _ in range(2):  # a crash is believed the second time
            try:
                found = self._worker().ask(request)
                break
            except Died as died:
                outcome = str(died).partition(":")[0]
                found = {"outcome": outcome, "detail": str(died)}
                if outcome == "timeout":
                    break
        fields = mutant._asdict()
        del fields["text"]
        return {**fields, **found, "seconds": round(time.perf_counter() - start, 2)}

    def run(self, mutants: list[Mutant], kept: list[dict[str, Any]], file: str | None) -> list[dict[str, Any]]:
        """Judge mutants in their order; write what is known to a file now and then."""
        start = time.perf_counter()
        results: list[dict[str, Any]] = []
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            pending = [pool.submit(self.judge, mutant) for mutant in mutants]
            for done in concurrent.futures.as_completed(pending):
                results.append(done.result())
                if len(results) % 20 != 0 and len(results) != len(mutants):
                    continue
                counts = collections.Counter(result["outcome"] for result in results)
                text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
                print(f"{len(results)} of {len(mutants)}, {time.perf_counter() - start:.0f} s: {text}", flush=True)
                if file:
                    with open(file, "w", encoding="utf-8") as out:
                        json.dump(in_order(kept + results), out, indent=1)
        for worker in self._workers:
            worker.end()
        self.folder.cleanup()
        return in_order(kept + results)


def place(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("file", "line", "what", "mutated"))


def in_order(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(results, key=place)


def report(results: list[dict[str, Any]]) -> None:
    """Print a table by file, and every survivor."""
    columns = ("counted", *KILLED, "survived", "stillborn", "same", "error")
    print(f"\n{'file':16}" + "".join(f"{column:>10}" for column in columns) + "    killed")
    for file in [*sorted({result["file"] for result in results}), "all"]:
        counts = collections.Counter(result["outcome"] for result in results if file in (result["file"], "all"))
        killed = sum(counts[outcome] for outcome in KILLED)
        counts["counted"] = killed + counts["survived"]
        share = f"{killed / counts['counted']:10.1%}" if counts["counted"] else ""
        print(f"{file:16}" + "".join(f"{counts[column]:10}" for column in columns) + share)
    print("\nSurvivors:")
    for result in results:
        if result["outcome"] == "survived":
            note = f"  ({result['detail']})" if result["detail"] else ""
            print(f"{result['file']}:{result['line']}: {result['what']}{note}")
            print(f"    - {result['original']}\n    + {result['mutated']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", help="only these, such as norms.cu; all by default")
    parser.add_argument("--limit", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of that draw")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", help="where to write every mutant and what became of it")
    parser.add_argument("--again", metavar="JSON", help="keep the verdicts of what --json wrote, but for survivors")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    texts = sources.texts()
    unknown = set(options.files or ()) - texts.keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(texts))}")
    mutants = [mutant for name in options.files or sorted(texts) for mutant in Text(name, texts[name]).mutants()]
    random.Random(options.seed).shuffle(mutants)
    kept = []
    if options.again:
        with open(options.again, encoding="utf-8") as file:
            kept = [result for result in json.load(file) if result["outcome"] in (*KILLED, "stillborn", "same")]
    known = {place(result) for result in kept}
    mutants = [mutant for mutant in mutants if place(mutant._asdict()) not in known]
    mutants = mutants[: options.limit]
    if options.list:
        for mutant in sorted(mutants):
            print(f"{mutant.file}:{mutant.line}: {mutant.what}\n    - {mutant.original}\n    + {mutant.mutated}")
        return
    session = Session(options.jobs)
    print("the sources as they are:")
    session.measure()
    print(f"{len(mutants)} mutants", flush=True)
    report(session.run(mutants, kept, options.json))


if __name__ == "__main__":
    main()
