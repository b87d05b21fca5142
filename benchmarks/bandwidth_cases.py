# SPDX-License-Identifier: Apache-2.0
"""The cases of bandwidth.py: operators, sizes, targets, and how many bytes each moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import softmax_cases

BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


class Operator(NamedTuple):
    """What an operator must read and write: arrays of rows, and arrays of a row's size."""

    norm: str
    way: str
    reads: int
    writes: int
    columns: int


OPERATORS = {
    "rms_norm": Operator("rms_norm", "forward", 1, 1, 1),
    "layer_norm": Operator("layer_norm", "forward", 1, 1, 2),
    "add_rms_norm": Operator("rms_norm", "add before", 2, 2, 1),
    "add_layer_norm": Operator("layer_norm", "add before", 2, 2, 2),
    "rms_norm_add": Operator("rms_norm", "add after", 2, 1, 1),
    "layer_norm_add": Operator("layer_norm", "add after", 2, 1, 2),
    "rms_norm_backward": Operator("rms_norm", "backward", 2, 1, 2),
    "layer_norm_backward": Operator("layer_norm", "backward", 2, 1, 3),
    "softmax": Operator("softmax", "forward", 1, 1, 0),
    "softmax_backward": Operator("softmax", "backward", 2, 1, 0),
    "log_softmax": Operator("softmax", "forward", 1, 1, 0),
    "log_softmax_backward": Operator("softmax", "backward", 2, 1, 0),
}
PLAIN = ("rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward", "softmax", "softmax_backward")

# (rows, columns) in bfloat16. float32 has half the rows, and so as many bytes.
SHAPES = (
    *((32768, hidden) for hidden in (256, 512, 1024, 2048, 4096, 8192)),
    *((2**28 // hidden, hidden) for hidden in (16384, 32768, 65536, 131072, 262144)),
)
ADDED = tuple(shape for shape in SHAPES if shape[1] in (1024, 4096, 8192, 16384, 65536))
RAGGED = tuple((32768, hidden) for hidden in (3000, 4093, 4097, 5121))
# Those between powers of two that TransformerEngine has tuned kernels for, or well-known models have, and two odd ones;
# and lengths of softmax, vocabularies among them, and short ones of many rows.
MODEL_SIZES = (
    *(768, 1536, 2304, 2560, 3072, 3584, 3840, 5120, 6144, 7168, 10240, 12288, 12800, 14336, 15360, 18432, 20480),
    *(24576, 25600, 28672, 30720, 40960, 49152, 57344),
    *(1001, 2001),
)
SHORTEST_LENGTHS = (17, 32, 64)
SHORT_LENGTHS = (127, 200, 300, 600, 1000, 1001, 1023)
LENGTHS = (2500, 10000, 16385, 20000, 40000, 50257, 80000, 100000, 128256, 200000)


def full_rows(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return shapes of as much data as SHAPES have."""
    return tuple((min(32768, 2**28 // size), size) for size in sizes)


MODELS = full_rows(MODEL_SIZES)
MODEL_LENGTHS = (
    *((2**22, length) for length in SHORTEST_LENGTHS),
    *((2**18, length) for length in SHORT_LENGTHS),
    *full_rows(LENGTHS),
)
# Query and key heads inside a packed qkv: of each token 32 query, 8 key and 8 value heads.
TOKENS, PACKED_HEADS = 32768, 48
PACKED = {"q": (0, 32), "k": (32, 8)}  # the first head, and how many
SMALL = tuple((rows, 4096) for rows in (1, 16, 128))
# What --types measures: y of another type than x, by its form (torch's name, and whether each row has a scale of its
# own; else float8 has one for all, and amax); and a gradient that is added to dx.
FORMS = {
    "to float32": ("float32", False),
    "to float8_e4m3fn": ("float8_e4m3fn", False),
    "to float8_e4m3fn by row": ("float8_e4m3fn", True),
    "to int8 by row": ("int8", True),
}
DRESIDUAL = "and dresidual"
COMPILED_HIDDEN = (1024, 4096, 8192, 32768, 131072)

# (norm or any, kind, backward, data type or any, hidden at most): the least ratio to the ceiling; the first that fits a
# case.
TARGETS = (
    ("", "shape", False, "", 512, None),
    ("", "shape", True, "", 512, None),
    ("softmax", "shape", False, "", 262144, 0.96),
    ("softmax", "shape", True, "", 131072, 0.96),
    ("softmax", "shape", True, "", 262144, 0.93),
    ("", "shape", False, "", 262144, 0.95),
    ("", "shape", True, "bfloat16", 65536, 0.92),
    ("", "shape", True, "bfloat16", 262144, 0.85),
    ("", "shape", True, "float32", 32768, 0.92),
    ("", "shape", True, "float32", 131072, 0.85),
    ("", "shape", True, "float32", 262144, 0.55),
    ("", "ragged", False, "", 1 << 30, 0.85),
    ("", "ragged", True, "", 1 << 30, 0.75),
    ("", "packed", False, "", 1 << 30, 0.90),
    ("", "packed", True, "", 1 << 30, 0.90),
    ("", "masked", False, "", 1 << 30, 0.92),
    ("", "causal", False, "", 1 << 30, 0.90),
    ("", "causal", True, "", 1 << 30, 0.90),
    ("", "aligned", False, "", 1 << 30, 0.90),
    ("", "aligned", True, "", 1 << 30, 0.90),
)


class Case(NamedTuple):
    """An operator on a shape.

    `kind` is "shape", "ragged", "packed" (a row is a token, with heads in it), "small", or one of softmax's that
    softmax_cases names, where there is a matrix of rows by hidden for each of (batch, heads).
    """

    operator: str
    kind: str
    dtype: str
    rows: int
    hidden: int
    part: str = ""  # of a packed qkv
    per_head: bool = False
    matrix: tuple[int, ...] = ()
    form: str = ""  # of FORMS, or DRESIDUAL

    @property
    def out(self) -> str:
        """Type of y or dx."""
        return FORMS[self.form][0] if self.form in FORMS else self.dtype

    @property
    def by_row(self) -> bool:
        return self.form in FORMS and FORMS[self.form][1]

    @property
    def does(self) -> Operator:
        return OPERATORS[self.operator]

    @property
    def backward(self) -> bool:
        return self.does.way == "backward"

    @property
    def heads(self) -> int:
        return PACKED[self.part][1] if self.part else 1

    @property
    def shape(self) -> str:
        if self.matrix:
            return f"{self.kind} {'x'.join(map(str, (*self.matrix, self.rows, self.hidden)))}"
        if not self.part:
            return f"{self.rows}x{self.hidden}{self.form and f' {self.form}'}"
        return f"{self.part} {self.rows}x{self.heads}x{self.hidden}{' per head' if self.per_head else ''}"

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is measured."""
        if self.kind == "small":
            return self.does.way == "forward"  # autograd's nodes are not captured
        if self.matrix:
            return self.kind in ("masked", "causal", "aligned") and self.dtype == "bfloat16" and self.hidden <= 16384
        return (
            self.kind == "shape"
            and not self.operator.startswith("log_")
            and self.dtype == "bfloat16"
            and self.hidden in COMPILED_HIDDEN
        )

    @property
    def target(self) -> float | None:
        if self.form:
            return None
        for norm, kind, backward, dtype, most, ratio in TARGETS:
            fits = norm in ("", self.does.norm) and dtype in ("", self.dtype) and self.hidden <= most
            if (kind, backward) == (self.kind, self.backward) and fits:
                return ratio
        return None

    @property
    def row_bytes(self) -> int:
        """Of one array of rows."""
        return math.prod(self.matrix) * self.rows * self.heads * self.hidden * BYTES[self.dtype]

    @property
    def copied_bytes(self) -> int:
        """Of all arrays of rows."""
        reads = self.does.reads + (self.form == DRESIDUAL)
        return reads * self.row_bytes + self.does.writes * self.row_bytes // BYTES[self.dtype] * BYTES[self.out]

    @property
    def moved_bytes(self) -> int:
        does = self.does
        if self.kind in softmax_cases.CAUSAL:
            read = softmax_cases.read_columns(self)
            return self.row_bytes + does.reads * self.row_bytes * read // (self.rows * self.hidden)
        if self.matrix:
            element = 1 if self.kind == "masked" else BYTES[self.dtype]
            return self.copied_bytes + softmax_cases.mask_elements(self) * element
        column_bytes = self.row_bytes // (self.rows * (1 if self.per_head else self.heads))
        return self.copied_bytes + does.columns * column_bytes


def model_cases(only: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    found = []
    for dtype, operator in itertools.product(dtypes, [name for name in only if name in PLAIN]):
        shapes = MODEL_LENGTHS if OPERATORS[operator].norm == "softmax" else MODELS
        divisor = 2 if dtype == "float32" else 1
        found += [
            Case(operator, "ragged" if hidden % 8 else "shape", dtype, rows // divisor, hidden)
            for rows, hidden in shapes
        ]
    return found


def typed_cases(only: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    return [
        Case(operator, "shape", dtype, rows // (2 if dtype == "float32" else 1), hidden, form=form)
        for dtype, operator in itertools.product(dtypes, only)
        if operator in PLAIN and OPERATORS[operator].norm != "softmax"
        for form in ((DRESIDUAL,) if OPERATORS[operator].way == "backward" else FORMS)
        if form != f"to {dtype}"
        for rows, hidden in ADDED
    ]


def cases(only: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    found = []
    for dtype in dtypes:
        divisor = 2 if dtype == "float32" else 1
        for operator in only:
            plain = operator in PLAIN
            for kind, shapes in (("shape", SHAPES if plain else ADDED), ("ragged", RAGGED if plain else ())):
                found += [Case(operator, kind, dtype, rows // divisor, hidden) for rows, hidden in shapes]
        for operator in only:
            if operator not in PLAIN or OPERATORS[operator].norm != "softmax":
                continue
            kinds = ("masked", "causal") if operator == "softmax" else ("causal",)
            others = softmax_cases.OTHER_KINDS[OPERATORS[operator].way]
            for batch, heads, size in softmax_cases.MATRICES:
                matrix = (max(1, batch // divisor), heads if batch > 1 else heads // divisor)
                here = others if (batch, heads, size) in softmax_cases.OTHER_MATRICES else ()
                found += [Case(operator, kind, dtype, size, size, matrix=matrix) for kind in (*kinds, *here)]
            found.append(
                Case(operator, "aligned", dtype, softmax_cases.ALIGNED_QUERIES, 16384, matrix=(4 // divisor, 4))
            )
    if "bfloat16" in dtypes:
        for operator, sizes in (("rms_norm", (64, 128, 256)), ("rms_norm_backward", (128,))):
            if operator in only:
                found += [
                    Case(operator, "packed", "bfloat16", TOKENS, hidden, part, per_head)
                    for hidden in sizes
                    for part in PACKED
                    for per_head in (False, True)
                ]
        # Last: what a failed capture leaves behind cannot reach others.
        for operator in only:
            if operator in PLAIN or operator == "add_rms_norm":
                found += [Case(operator, "small", "bfloat16", rows, hidden) for rows, hidden in SMALL]
    return found
