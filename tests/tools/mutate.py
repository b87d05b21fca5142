"""Breaks the kernel texts mechanically, and says which of the broken ones no check notices. Run by hand.

    python tests/mutate.py [--files norms.cuh ring.cuh] [--limit 100] [--minutes 20] [--seed 0] [--jobs 2]

Each mutant differs from the sources in one place. It runs through trials in the simulator: cases of the norm family and
of softmax, each with a configuration of small rows, held against float64 as the tests hold theirs; checked mode first,
then fast mode in two orders. A mutant that no longer compiles is seen by the compiler. A survivor wants to be read: it
is equivalent, or visible only in speed, or a gap.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import copyreg
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "simulator")]

import calls  # noqa: E402
import numpy as np  # noqa: E402
import rigs  # noqa: E402
import softmax_calls  # noqa: E402
import softmax_reference  # noqa: E402
import test_conversions as conversions  # noqa: E402
from cases import BY_ROW, DELAYED, Case  # noqa: E402
from reference import NUMPY_TYPES  # noqa: E402

from transformer_rtc import KernelManager, SimulatedDevice, dispatch, softmax, softmax_backward, sources, using  # noqa: E402
from transformer_rtc.cache import DiskCache  # noqa: E402
from transformer_rtc.errors import CompileError, LaunchError, SimulationError  # noqa: E402
from transformer_rtc.manager import Image  # noqa: E402
from transformer_rtc.ops.norm_configurations import NormConfig  # noqa: E402
from transformer_rtc.ops.softmax_kernels import SoftmaxConfig  # noqa: E402
from transformer_rtc.spec import (  # noqa: E402
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    DType,
    KernelSpec,
    Target,
)

# Seconds that a mutant may take for one trial, which takes a few: then it has a loop without an end.
TIMEOUT = 40.0
LAYOUTS = (rigs.ALIGNED, rigs.MISALIGNED, rigs.SECOND_MISALIGNED)

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


# ---- Trials ----------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A case, and how its rows are divided.

    Attributes
    ----------
    case : Case
        The call.
    config : NormConfig or None
        None: the general kernels.
    architecture : int
        Whose branches are taken.
    eps : float
        0: with rows of zeros, an infinity, a NaN and a large mean. A row of zeros is also where each row has a scale.
    """

    case: Case
    config: NormConfig | None
    architecture: int = 90
    eps: float = calls.EPS

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.config.symbol if self.config else 'general'}, sm_{self.architecture}"

    def run(self, checked: bool) -> None:
        # As few multiprocessors as hold a row: groups of CTAs take several rows in turn.
        held = self.config.threads * self.config.ctas_per_row if self.config else 1
        multiprocessors = max(1 + self.case.margin, held // 1024)
        first, *others = rigs.devices(self.architecture, multiprocessors=multiprocessors)
        rng = np.random.default_rng(0)
        with rigs.configured(self.case.operator, self.config), mock.patch.object(calls, "EPS", self.eps):
            given = calls.make_inputs(rng, self.case)
            rows = given["x"].reshape(-1, self.case.hidden)
            if self.eps == 0 or self.case.scaling == BY_ROW:
                rows[0] = 0
            if self.eps == 0:
                rows[1, -1] = np.inf
                rows[2, 0] = np.nan
                rows[3] = 1e4 + rng.standard_normal(self.case.hidden)
            with np.errstate(all="ignore"):
                rigs.hold([first] if checked else others, self.case, rng, LAYOUTS, given)


class SoftmaxTrial(NamedTuple):
    """Calls of softmax and its logarithm, forward and backward, on rows that are divided alike.

    Attributes
    ----------
    config : SoftmaxConfig or None
        None: the general kernels.
    dtype : DType
        Of x, and of y but where `same_bits`.
    shapes : tuple
        Of x.
    layouts : tuple
        Elements of x before its first row, and between rows.
    architecture : int
        Whose branches are taken.
    mask, sink : DType or None
        Of the mask, and of the sinks.
    along : tuple
        The dimensions along which a mask of floats is broadcast.
    keeps : bool
        Whether the mask says what takes part.
    causal, window
        As the operators take them. What they exclude is NaN.
    special : bool
        Whether rows have infinities and NaN, and one has elements whose exponentials are all 0.
    in_place : bool
        Whether each output replaces an input.
    same_bits : bool
        Whether results in float32 are held to the same bits wherever a row lies, and not against float64.
    """

    config: SoftmaxConfig | None
    dtype: DType
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[tuple[int, int], ...] = ((0, 0), (3, 0), (0, 1), (5, 3))
    architecture: int = 90
    mask: DType | None = None
    sink: DType | None = None
    along: tuple[int, ...] = (0,)
    keeps: bool = False
    causal: str | None = None
    window: int | None = None
    special: bool = False
    in_place: bool = False
    same_bits: bool = False

    @property
    def name(self) -> str:
        parts = [f"softmax of {self.dtype.symbol}", self.config.symbol if self.config else "general"]
        parts += [f"{name} {dtype.symbol}" for name, dtype in (("mask", self.mask), ("sink", self.sink)) if dtype]
        parts += [f"along {self.along}"] if self.along != (0,) else []
        parts += [name for name in ("keeps", "special", "in_place", "same_bits") if getattr(self, name)]
        return ", ".join(
            (*parts, *([f"{self.causal}, window {self.window}"] if self.causal else []), f"sm_{self.architecture}")
        )

    def run(self, checked: bool) -> None:
        # One multiprocessor: groups of CTAs of a cooperative grid take several rows in turn.
        first, *others = rigs.devices(self.architecture, static=self.config is None, multiprocessors=1)
        for device in [first] if checked else others:
            divided = softmax_calls.configured(self.config) if self.config else contextlib.nullcontext()
            with using(device), divided, np.errstate(all="ignore"):
                rng = np.random.default_rng(0)
                for shape in self.shapes:
                    if self.same_bits:
                        x, dy = (softmax_reference.drawn(rng, shape, self.dtype) for _ in range(2))
                        softmax_calls.hold_same_bits(x, dy, range(8))
                    elif self.in_place:
                        self._hold_in_place(rng, shape)
                    else:
                        for layout in self.layouts:
                            self._hold(rng, shape, *layout)

    def _drawn(self, rng: np.random.Generator, shape: tuple[int, ...], offset: int, gap: int) -> np.ndarray:
        rows = softmax_reference.drawn(rng, shape, self.dtype).reshape(-1, shape[-1])
        return softmax_calls.at(rows, offset, gap).reshape(shape)

    def _hold_in_place(self, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
        for layout in self.layouts:
            x, dy = self._drawn(rng, shape, *layout), self._drawn(rng, shape, *layout)
            wanted = softmax_reference.forward(x, out=self.dtype)["y"]
            softmax_calls.assert_within(softmax(x, out=x), wanted, self.dtype)
            wanted = softmax_reference.backward(dy, x, out=self.dtype)
            softmax_calls.assert_within(softmax_backward(dy, x, out=dy), wanted, self.dtype)

    def _hold(self, rng: np.random.Generator, shape: tuple[int, ...], offset: int, gap: int) -> None:
        x, dy = self._drawn(rng, shape, offset, gap), self._drawn(rng, shape, offset, 0)
        options: dict[str, Any] = {}
        within = softmax_reference.taking_part(shape, causal=self.causal, window=self.window)
        if self.causal:
            x[~within] = dy[~within] = np.nan
            options |= {"causal": self.causal, "window": self.window}
        if self.special:
            rows = x.reshape(-1, shape[-1])
            rows[0] = rows[1, : shape[-1] // 2] = -np.inf
            rows[2, -1], rows[3, 0], rows[4, 0] = np.inf, np.nan, -np.inf
            rows[-1] += 400
        if self.mask:
            # Where rows have gaps, they are aligned apart from the mask.
            along = (1,) if self.mask is BOOL else self.along
            of_mask = tuple(1 if i in along else extent for i, extent in enumerate(shape))
            mask = rng.random(of_mask) < 0.3
            mask[..., 0, :] = of_mask[2] > 1
            within = within & ~mask
            if self.mask is BOOL:
                given = mask != self.keeps
            else:
                given = np.where(mask, -np.inf, rng.standard_normal(of_mask)).astype(NUMPY_TYPES[self.mask])
                options["added"] = given
            options["mask"] = softmax_calls.at(given.reshape(-1, shape[-1]), offset).reshape(of_mask)
            options["mask_keeps"] = self.keeps
        if self.sink:
            sink = np.array([0.5, -np.inf, 200, 9] * shape[1])[: shape[1]]
            options["sink"] = sink.astype(NUMPY_TYPES[self.sink])
        softmax_calls.hold(x, dy, self.dtype, -0.4 if self.special else 0.7, within, **options)


class Conversion(NamedTuple):
    """A conversion of a format, on every value where rounding changes."""

    format: str
    helper: str
    widens: bool
    architecture: int = 90

    @property
    def name(self) -> str:
        return f"{'widen' if self.widens else 'narrow'} {self.helper}"

    def run(self, checked: bool) -> None:
        test = (
            conversions.test_every_narrow_value_is_widened_exactly
            if self.widens
            else conversions.test_every_pair_of_neighbours_is_rounded_to_the_nearest_and_ties_to_even
        )
        test(self.format, self.helper, SimulatedDevice(checked=checked))


def _forward(operator: str, rows: int, hidden: int, *types: Any, **options: Any) -> Case:
    """Return a case of the types of x, the weight, the bias and the output."""
    x, weight, bias, out = types
    return Case(rows, hidden, x, weight, out, True, operator, bias, mean="layer" in operator, **options)


def _backward(operator: str, rows: int, hidden: int, *types: Any, **options: Any) -> Case:
    """Return a case of the types of x, dy, the weight and dx."""
    x, dy, weight, out = types
    options = {"dweight": FLOAT32, "dbias": FLOAT32, **options}
    return Case(rows, hidden, x, weight, out, options.pop("rstd", False), operator, dy=dy, **options)


def _config(threads: int, rows: int, vector: int, steps: int, ctas: int = 1, stages: int = 0, **ways: int) -> Any:
    return NormConfig(threads, rows, vector, steps, ctas, stages=stages, **ways)


def _trials() -> Iterator[AnyTrial]:
    """Yield every template and branch, at shapes where a wrong one shows."""
    f32, f16, bf16, e4m3, e5m2 = FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2
    rms, layer, add_rms, add_layer, rms_add, layer_add = (
        "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add",
    )  # fmt: skip
    of_rms, of_layer = "rms_norm_backward", "layer_norm_backward"
    shared, cluster = {"in_shared": True}, {"clusters": True}
    both = {**shared, **cluster}
    warp = _config(32, 1, 4, 2)
    # Registers: whole rows, parts of a warp, warps.
    yield Trial(_forward(rms, 6, 256, f32, f32, None, f32, weight_offset=0.25), warp)
    yield Trial(_forward(layer, 15, 24, bf16, bf16, f32, bf16, heads=3), _config(4, 8, 8, 1))
    yield Trial(_forward(rms, 6, 13, f32, f16, None, f32), _config(4, 4, 4, 1))
    yield Trial(_forward(add_layer, 5, 7, f16, None, f16, f16, residual=f16), _config(8, 4, 1, 1))
    yield Trial(_forward(rms, 4, 8, f32, f32, None, f32), _config(2, 16, 4, 1), eps=0.0)
    yield Trial(_forward(layer, 4, 200, f32, f32, f32, f32), _config(64, 3, 4, 1), eps=0.0)
    yield Trial(_forward(add_layer, 3, 1003, f16, f32, None, f16, residual=f32), _config(64, 1, 8, 2))
    yield Trial(_forward(rms_add, 3, 768, bf16, bf16, bf16, bf16, residual=bf16, heads=3), _config(96, 1, 8, 1))
    yield Trial(_forward(layer, 2, 1020, f32, None, None, f32), _config(1024, 1, 1, 1))
    yield Trial(_forward(rms, 2, 543, f32, None, None, f32), _config(544, 1, 1, 1))
    # Outputs of 8 bits.
    yield Trial(_forward(layer, 3, 500, bf16, bf16, bf16, e4m3, scaling=DELAYED), _config(64, 1, 8, 1))
    yield Trial(_forward(rms, 3, 250, f32, f32, None, e5m2, scaling=("scale", "amax")), _config(32, 2, 2, 4))
    yield Trial(_forward(rms, 3, 512, f32, f32, None, INT8, scaling=BY_ROW), _config(64, 1, 4, 2))
    yield Trial(
        _forward(add_layer, 3, 501, bf16, None, f32, e4m3, residual=f32, scaling=BY_ROW), _config(64, 1, 4, 2, **shared)
    )
    yield Trial(_forward(layer, 3, 701, f16, f16, None, e5m2, scaling=BY_ROW), _config(64, 1, 4, 1))
    yield Trial(_forward(rms, 3, 1000, bf16, None, None, INT8, scaling=BY_ROW), _config(64, 1, 4, 2, 2, **cluster))
    # Chunks.
    yield Trial(_forward(layer, 3, 1000, f32, f32, f32, f32), warp)
    yield Trial(_forward(add_rms, 3, 701, f32, f16, None, bf16, residual=f32), warp)
    yield Trial(_forward(layer_add, 3, 768, bf16, f32, None, bf16, residual=f16), _config(32, 1, 8, 1))
    yield Trial(_forward(layer, 5, 1801, f32, f32, f32, f32, margin=1), _config(64, 1, 4, 1, 4, **cluster))
    # Shared memory.
    yield Trial(_forward(rms, 3, 512, f32, f32, None, f32), _config(64, 1, 4, 2, **shared))
    yield Trial(_forward(add_layer, 3, 760, bf16, bf16, f16, f32, residual=bf16), _config(64, 1, 8, 2, **shared))
    yield Trial(
        _forward(layer_add, 35, 500, f16, f32, None, f16, residual=f16, margin=1, heads=5),
        _config(64, 1, 4, 2, **shared),
    )
    # Rows together.
    two = {**both, "together": 2}
    yield Trial(
        _forward(layer, 5, 4096, bf16, bf16, bf16, bf16, weight_offset=0.25), _config(64, 1, 8, 8, **shared, together=2)
    )
    yield Trial(_forward(layer, 7, 1000, f32, f32, f16, e4m3, scaling=DELAYED), _config(64, 1, 4, 2, 2, **two))
    yield Trial(
        _forward(add_rms, 5, 1000, bf16, bf16, None, bf16, residual=bf16),
        _config(64, 1, 4, 2, 2, **shared, together=2),
        80,
    )
    # Ragged.
    yield Trial(_forward(rms, 3, 1021, bf16, bf16, None, bf16), _config(64, 1, 8, 2, **shared))
    yield Trial(_forward(add_layer, 3, 333, f32, None, f32, f16, residual=f16), _config(32, 1, 4, 3, **shared))
    yield Trial(_forward(rms_add, 3, 699, f16, f16, None, f32, residual=bf16), _config(64, 1, 4, 3, **shared))
    # Rows in turn.
    turns = {**shared, "stages": 2}
    yield Trial(_forward(layer, 17, 1000, f32, f32, f32, f32), _config(256, 1, 4, 1, **turns))
    yield Trial(_forward(rms, 300, 120, bf16, f32, None, bf16), _config(16, 8, 8, 1, **turns))
    yield Trial(_forward(rms_add, 17, 900, bf16, bf16, None, bf16, residual=f32), _config(256, 1, 4, 1, **turns))
    yield Trial(
        _forward(add_layer, 17, 1001, f16, f32, f16, bf16, residual=f16), _config(256, 1, 2, 2, stages=3, **shared)
    )
    yield Trial(
        _forward(rms, 17, 1024, f32, None, None, e4m3, scaling=DELAYED), _config(256, 1, 4, 1, stages=3, **shared)
    )
    yield Trial(_forward(add_rms, 300, 252, f32, f32, None, f16, residual=f32), _config(32, 8, 4, 2, **turns))
    # More of the weight, and then of the row, than registers hold.
    yield Trial(_forward(layer, 17, 2000, f32, f32, f32, f32), _config(64, 1, 4, 8, **turns))
    yield Trial(_forward(layer_add, 17, 4000, bf16, bf16, bf16, bf16, residual=bf16), _config(64, 1, 8, 8, **turns))
    yield Trial(_forward(add_layer, 9, 1016, bf16, bf16, bf16, bf16, residual=f32), _config(64, 1, 4, 1, 4, 3, **both))
    # Clusters and cooperative grids; three slots or more tell a row's sums while the one before is finished.
    for architecture, ways in ((90, cluster), (80, {})):
        for ctas, in_shared, stages in ((4, False, 0), (2, True, 0), (4, True, 2), (4, True, 3)):
            hidden = ctas * 256 - (4 if stages else 7)
            config = _config(64, 1, 4, 1, ctas, stages=stages, in_shared=in_shared, **ways)
            yield Trial(_forward(layer, 21, hidden, f32, f32, f32, f32), config, architecture)
            yield Trial(_forward(add_rms, 21, hidden, bf16, bf16, None, f16, residual=bf16), config, architecture)
    yield Trial(_forward(rms, 9, 970, f32, f32, None, f32), _config(64, 1, 1, 1, 16), 80)
    # Backward.
    some, three = {**shared, "stages": 2}, {**shared, "stages": 3}
    yield Trial(_backward(of_rms, 140, 250, f32, f32, f32, f32, dbias=None), _config(32, 3, 4, 2, **some))
    yield Trial(
        _backward(of_layer, 600, 24, bf16, f16, bf16, bf16, residual=bf16, rstd=True), _config(4, 8, 8, 1, **three)
    )
    yield Trial(_backward(of_layer, 300, 64, f16, f16, f32, f32, heads=3), _config(8, 4, 8, 1, **some))
    yield Trial(_backward(of_rms, 140, 200, f32, f32, None, None, dweight=f16, dbias=f16), _config(32, 4, 4, 2, **some))
    yield Trial(_backward(of_rms, 140, 200, f32, bf16, f32, None, dweight=None), _config(32, 4, 4, 2, **some))
    yield Trial(
        _backward(of_layer, 140, 200, f32, f32, f32, f32, dweight=None, dbias=None), _config(32, 4, 4, 2, **some)
    )
    yield Trial(_backward(of_layer, 17, 1001, bf16, bf16, bf16, bf16), _config(256, 1, 8, 1, **some))
    yield Trial(_backward(of_rms, 17, 999, f32, f32, f32, f32, residual=f32, rstd=True), _config(256, 1, 4, 1, **some))
    yield Trial(_backward(of_layer, 30, 1500, f32, f32, f32, f32), _config(64, 1, 4, 8, stages=1, **shared))
    yield Trial(_backward(of_rms, 30, 2000, f32, f32, f32, f32, rstd=True), _config(64, 1, 4, 8, stages=1, **shared))
    yield Trial(_backward(of_rms, 4, 64, f32, f32, f32, f32), _config(16, 4, 4, 1, **some), eps=0.0)
    for architecture, ways in ((90, both), (80, shared)):
        for stages in (2, 3):
            config = _config(64, 1, 4, 1, 4, stages=stages, **ways)
            yield Trial(_backward(of_layer, 21, 1000, f32, f32, f32, f32, residual=f16), config, architecture)
            yield Trial(_backward(of_rms, 20, 1001, bf16, bf16, bf16, bf16, heads=5, rstd=True), config, architecture)
            yield Trial(_backward(of_rms, 21, 1024, f32, f32, f32, f32), config, architecture)
    # General kernels: rows of a warp, and longer ones of a CTA.
    yield Trial(_forward(rms, 9, 37, f32, bf16, None, f16, heads=3), None)
    yield Trial(_forward(layer, 9, 700, f16, f32, f32, e4m3, scaling=DELAYED), None)
    yield Trial(_forward(add_layer, 3, 1501, bf16, f16, bf16, f32, residual=f32), None)
    yield Trial(_forward(rms_add, 70, 9, f32, f32, f32, bf16, residual=f16, margin=1), None)
    yield Trial(_forward(layer, 3, 5000, f32, f32, None, INT8, scaling=BY_ROW), None)
    yield Trial(_forward(layer, 4, 5, f32, f32, f32, f32), None, eps=0.0)
    yield Trial(_backward(of_rms, 70, 37, f32, bf16, f16, f32, residual=f32), None)
    yield Trial(_backward(of_layer, 19, 1500, bf16, bf16, f32, bf16), None)
    yield Trial(_backward(of_layer, 60, 8, f16, f32, f32, f16, heads=3, rstd=True), None)
    for widens, pairs in ((False, conversions.NARROWING), (True, conversions.WIDENING)):
        for name, helper in pairs:
            yield Conversion(name, helper, widens)
    yield from _softmax_trials()


def _softmax_trials() -> Iterator[SoftmaxTrial]:
    f32, f16, bf16 = FLOAT32, FLOAT16, BFLOAT16
    # Parts of warps, warps, chunks, CTAs of a cluster, which is a cooperative grid on sm_80, and chunks of these. A
    # part is full at every alignment, which is of 4 or 8 elements.
    few, warp, warps = SoftmaxConfig(2, 32, 0, 4), SoftmaxConfig(8, 16, 0, 2), SoftmaxConfig(64, 2, 0, 3)
    chunks = SoftmaxConfig(64, 1, 0, 2, chunked=True)
    ctas = SoftmaxConfig(64, 1, 0, 2, 4, clusters=True)
    chunks_of_ctas = SoftmaxConfig(64, 1, 0, 1, 2, clusters=True, chunked=True)
    staged = SoftmaxConfig(64, 1, 0, 1, staged=True)
    staged_by_ctas = SoftmaxConfig(64, 1, 0, 1, 2, clusters=True, staged=True)
    tiles, tiles_of_floats = (SoftmaxConfig(1, 64, 0, steps, tiled=True) for steps in (4, 8))
    every = tuple((offset, 0) for offset in range(8))
    # Rows of a thread, more than come in one turn among them.
    layouts = ((0, 0), (1, 0), (0, 3))
    yield SoftmaxTrial(tiles_of_floats, f32, ((6, 2), (37, 3), (37, 29), (70, 32)), layouts, special=True)
    yield SoftmaxTrial(tiles, bf16, ((37, 1), (33, 17), (33, 24), (37, 31), (70, 32), (2500, 5)), layouts)
    yield SoftmaxTrial(tiles, bf16, ((37, 17), (37, 24)), in_place=True)
    yield SoftmaxTrial(tiles_of_floats, bf16, ((1, 31),), same_bits=True)
    yield SoftmaxTrial(staged, bf16, ((5, 1), (5, 700), (5, 1021)), (*every, (0, 1)), special=True)
    yield SoftmaxTrial(staged, f32, ((2, 3, 9, 700),), ((0, 0), (3, 1)), mask=BOOL, causal="aligned", window=300)
    yield SoftmaxTrial(staged, f16, ((2, 3, 5, 333),), ((0, 0), (3, 1)), mask=f32, sink=f32)
    yield SoftmaxTrial(staged_by_ctas, f32, ((6, 40), (6, 1999)), (*every[:2], (3, 1)), special=True)
    yield SoftmaxTrial(staged_by_ctas, bf16, ((2, 3, 9, 3001),), ((0, 0), (3, 1)), 80, mask=BOOL, keeps=True)
    yield SoftmaxTrial(staged_by_ctas, bf16, ((1, 1900),), same_bits=True)
    yield SoftmaxTrial(few, bf16, ((37, 5), (37, 33), (37, 49), (37, 57), (37, 63)), every)
    yield SoftmaxTrial(warp, f32, ((37, 1), (37, 2), (37, 7), (37, 61), (37, 64)), (*every[:4], (0, 1)), special=True)
    yield SoftmaxTrial(warps, f16, ((5, 9), (5, 1021), (5, 1536)), (*every, (0, 1)))
    yield SoftmaxTrial(chunks, f32, ((6, 500), (6, 513), (6, 1700)), special=True)
    yield SoftmaxTrial(ctas, bf16, ((2, 37), (2, 4001), (2, 4096)), every)
    yield SoftmaxTrial(warp, bf16, ((37, 3), (37, 127)), in_place=True)
    for config, columns in ((warps, 700), (warp, 60), (chunks, 1100), (ctas, 1900)):
        yield SoftmaxTrial(config, bf16, ((1, columns),), same_bits=True)
    # What does not take part.
    yield SoftmaxTrial(
        warp, f16, ((2, 3, 17, 17), (2, 3, 5, 128), (6, 1, 1, 40)), mask=BOOL, causal="aligned", special=True
    )
    yield SoftmaxTrial(chunks_of_ctas, f32, ((2, 3, 5, 1601),), mask=BOOL, keeps=True, causal="aligned", window=900)
    yield SoftmaxTrial(warps, f32, ((2, 3, 5, 700),), mask=bf16)
    yield SoftmaxTrial(chunks, bf16, ((2, 3, 5, 2100),), mask=f32, sink=f32)
    yield SoftmaxTrial(warp, bf16, ((2, 17, 100), (2, 40, 9), (7, 1, 50)), causal="aligned", window=7)
    # Sinks, and more rows of a head than there are threads that add them up.
    yield SoftmaxTrial(warp, f32, ((2, 4, 300, 9), (5, 3, 1, 61), (3, 1, 7, 16)), ((0, 0),), sink=f32)
    yield SoftmaxTrial(ctas, f32, ((2, 3, 7, 1999),), mask=BOOL, sink=f32)
    yield SoftmaxTrial(ctas, f32, ((2, 3, 7, 1999),), ((0, 0), (3, 1)), 80, sink=f16)
    yield SoftmaxTrial(chunks_of_ctas, bf16, ((2, 3, 9, 3001),), ((0, 0), (3, 1)), 80)
    yield SoftmaxTrial(None, f32, ((2, 3, 17, 40), (2, 4, 5, 1100)), ((0, 0), (3, 1)), mask=f16, sink=bf16)
    yield SoftmaxTrial(
        None, bf16, ((2, 3, 9, 33), (2, 300, 1, 9)), mask=BOOL, keeps=True, causal="aligned", window=9, sink=f32
    )
    # Masks whose gradient is added up over few rows and many, in one block and in several, by one group and by all.
    for config in (warp, None):
        yield SoftmaxTrial(config, f32, ((40, 3, 9, 37),), ((0, 0), (3, 0), (0, 3)), mask=f16)
        yield SoftmaxTrial(config, bf16, ((3, 7, 30, 45),), ((0, 0), (3, 0)), mask=f32, along=(1, 2))
        yield SoftmaxTrial(
            config, f32, ((3, 30, 5, 40), (36, 2, 33, 7)), ((0, 0), (0, 1)), mask=f32, along=(0, 2), causal="aligned",
            window=9,
        )  # fmt: skip
    yield SoftmaxTrial(warp, bf16, ((600, 2, 2, 33),), ((0, 0),), mask=bf16, along=(0, 1), sink=f32)
    yield SoftmaxTrial(None, f16, ((7, 7), (70, 700), (6, 1500)), special=True)
    yield SoftmaxTrial(None, bf16, ((37, 3), (5, 1100)), in_place=True)


AnyTrial = Trial | Conversion | SoftmaxTrial
TRIALS: dict[str, AnyTrial] = {trial.name: trial for trial in _trials()}

# ---- Images ----------------------------------------------------------------------------------------------------------


def _tool(image: bytes, *command: str) -> tuple[str, bytes]:
    """Return what a tool of binutils prints of a module, and what the module is afterwards."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(image)
        file.flush()
        printed = subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
        with open(file.name, "rb") as changed:
            return printed, changed.read()


def code_of(image: bytes) -> str:
    """Return a digest of a module without its debug information, which knows columns."""
    _, stripped = _tool(image, "strip", "--strip-all", "--remove-section=.note.gnu.build-id")
    return hashlib.sha256(stripped).hexdigest()


def lines_of(image: bytes) -> set[tuple[str, int]]:
    """Return the (file, line) that a module has code of."""
    text, _ = _tool(image, "objdump", "--dwarf=decodedline")
    found = re.findall(r"^(?:\S*/)?(\S+\.cuh?)\s+(\d+)\s+0x", text, re.MULTILINE)
    return {(name, int(line)) for name, line in found}


# ---- One mutant, in a process of its own, which may crash or hang ----------------------------------------------------


# Programs depend on which type it is by identity, which a spec keeps on its way between processes.
copyreg.pickle(DType, lambda dtype: (_dtype_of, (dtype.id,)))


def _dtype_of(number: int) -> DType:
    return DTYPES[number]


class Known(NamedTuple):
    """What the sources as they are give in a trial."""

    specs: dict[bool, list[KernelSpec]]  # of its kernels, by whether checked
    code: dict[bool, list[str]]
    lines: set[tuple[str, int]]
    included: set[str]
    seconds: float


class Recorder(KernelManager):
    """A manager that knows what it was asked for.

    Parameters
    ----------
    folder : str, optional
        Where compiled kernels are kept.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(DiskCache(folder))
        self.made: dict[KernelSpec, Image] = {}

    def _image(self, spec: KernelSpec, target: Target, before_compile: Callable[[Target], None]) -> Image:
        # Every way to a kernel that is simulated comes through here.
        self.made[spec] = super()._image(spec, target, before_compile)
        return self.made[spec]


@contextlib.contextmanager
def _managed(folder: str | None = None) -> Iterator[Recorder]:
    manager = Recorder(folder)
    with mock.patch.object(dispatch, "manager", manager), mock.patch.object(conversions, "MANAGER", manager):
        yield manager


def measure(pipe: Connection, name: str, folder: str) -> None:
    """Run a trial on the sources as they are: it must pass. `folder` keeps kernels that trials share."""
    trial = TRIALS[name]
    start = time.perf_counter()
    specs, code, lines, included = {}, {}, set(), set()
    for checked in (True, False):
        with _managed(folder) as manager:
            trial.run(checked)
        assert manager.made, "no kernel was seen: any mutant would survive"
        specs[checked] = list(manager.made)
        code[checked] = [code_of(image.data) for image in manager.made.values()]
        lines |= {line for image in manager.made.values() for line in lines_of(image.data)}
        included |= {file for spec in manager.made for file in sources.included(spec.program)}
    pipe.send(Known(specs, code, lines, included, time.perf_counter() - start))


def judge(pipe: Connection, mutant: Mutant, original: dict[str, Known]) -> None:
    """Send a name before each trial, and what became of the mutant after the last."""
    texts = {**sources.texts(), mutant.file: mutant.text}
    names = [name for name, known in original.items() if mutant.file in known.included]
    # Trials with code of the line first; where there is none, it is a constant, and any trial may show it.
    names.sort(key=lambda name: original[name].seconds)
    having = [name for name in names if (mutant.file, mutant.line) in original[name].lines] or names
    # What was inlined has another line: the others need not be checked too.
    others = [name for name in names if name not in having]
    changed = set()
    with mock.patch.object(sources, "texts", lambda: texts), _managed() as manager:
        for checked, name in (*itertools.product((True, False), having), *((False, name) for name in others)):
            pipe.send((None, name))
            try:
                target = SimulatedDevice(TRIALS[name].architecture, checked).target
                images = [manager.image(spec, target).data for spec in original[name].specs[checked]]
                if [code_of(image) for image in images] == original[name].code[checked]:
                    continue
                changed.add(name)
                TRIALS[name].run(checked)
            except CompileError as error:
                pipe.send(("compile", next(iter(re.findall("error: .*", error.log)), "")))
                return
            except SimulationError as error:
                pipe.send(("checks", f"{name}: {error.kind}: {error.what}"))
                return
            except (AssertionError, LaunchError) as error:
                pipe.send(("checks", f"{name}: {' '.join(str(error).split())[:160]}"))
                return
    pipe.send(("survived", f"{len(changed)} of {len(names)} trials have other code"))


def apart(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """Return the last thing that a function sends, called in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_as_group, args=(function, sender, *arguments))
    process.start()
    sender.close()
    found: tuple[Any, ...] = (None, "its start")
    try:
        while receiver.poll(TIMEOUT):
            found = receiver.recv()
        return found if found[0] else ("checks", f"{found[1]}: timeout")
    except EOFError:
        return found if found[0] else ("checks", f"{found[1]}: crash")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its compiler too
        process.join()


def _as_group(function: Any, pipe: Connection, *arguments: Any) -> None:
    os.setsid()
    function(pipe, *arguments)


def judged(mutant: Mutant, original: dict[str, Known]) -> dict[str, Any]:
    outcome, detail = apart(judge, mutant, original)
    return {**mutant._replace(text="")._asdict(), "outcome": outcome, "detail": detail}


# ---- All of them -----------------------------------------------------------------------------------------------------

OUTCOMES = ("compile", "checks", "survived")


def report(results: Iterable[dict[str, Any]]) -> None:
    """Print a table by file, and every survivor, in Markdown."""
    results = sorted(results, key=lambda result: (result["file"], result["line"], result["mutated"]))
    print("| file | mutants | seen by compile | seen by the checks | survived |\n|---|--:|--:|--:|--:|")
    for file in [*dict.fromkeys(result["file"] for result in results), "all"]:
        counts = collections.Counter(result["outcome"] for result in results if file in (result["file"], "all"))
        print(f"| {file} | {counts.total()} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")
    print("\n| place | mutation | mutated line | reading |\n|---|---|---|---|")
    for result in results:
        if result["outcome"] == "survived":
            cells = [f"{result['file']}:{result['line']}", f"`{result['what']}`", f"`{result['mutated']}`"]
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, result["detail"]]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", help="only these, such as norms.cuh; all by default")
    parser.add_argument("--limit", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--minutes", type=float, help="begin no mutant after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of that draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", help="where to write every mutant and what became of it")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    end = time.monotonic() + 60 * (options.minutes or float("inf"))
    texts = sources.texts()
    unknown = set(options.files or ()) - texts.keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(texts))}")
    mutants = [mutant for name in options.files or sorted(texts) for mutant in Text(name, texts[name]).mutants()]
    random.Random(options.seed).shuffle(mutants)
    mutants = mutants[: options.limit]
    if options.list:
        for mutant in sorted(mutants):
            print(f"{mutant.file}:{mutant.line}: {mutant.what}\n    - {mutant.original}\n    + {mutant.mutated}")
        return
    original: dict[str, Known] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TRIALS:
            found = apart(measure, name, folder)
            assert isinstance(found, Known), f"{name} fails on the sources as they are: {found[1]}"
            original[name] = found
    print(f"{len(TRIALS)} trials, {sum(known.seconds for known in original.values()):.0f} s", file=sys.stderr)
    results = []
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
        pending = [pool.submit(judged, mutant, original) for mutant in mutants]
        for done in concurrent.futures.as_completed(pending):
            results.append(done.result())
            if time.monotonic() > end:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            if options.json:
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(results, file, indent=1)
            if len(results) % 10 == 0:
                counts = collections.Counter(result["outcome"] for result in results)
                print(f"{len(results)} of {len(mutants)}: {dict(counts)}", file=sys.stderr, flush=True)
    report(results)


if __name__ == "__main__":
    main()
