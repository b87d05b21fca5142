# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the operators, beside the best copy of the run and every peer that can be imported.

GB/s counts each input read once and each output written once, the weights and their gradients included and one number a
row not; of a causal matrix, what is excluded is written and not read. The ceiling is the best copy with as many arrays
of rows read and written: torch's, or a kernel that only streams. Every provider allocates its outputs; a backward call
is given the statistics of the forward one where it takes them.

The L2 is flushed before every launch and providers are rotated. Bandwidth depends on where arrays lie, so all of it is
repeated at several placements; a provider's figure, and a copy's, is the median at its best one. Small batches are
timed inside a captured graph, where the L2 is warm.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import common
import softmax_cases
from tqdm import tqdm

import transformer_rtc
from transformer_rtc import LaunchConfig

DEVICE = "cuda"
EPS = 1e-6
OURS = "transformer_rtc"
STATIC = "static"
TORCH = "torch"
COMPILED = "torch.compile"
COPY = "copy by "  # the names of copies begin with it
CHECKED_ROWS = 32
WARM_UP = 3
AWAKE = 1500  # flushes before anything is measured: a third of a second, in which an idle GPU raises its clocks
# So large a flush hides what the host needs to put a launch, or autograd's several, on the stream.
FLUSH_BYTES = 1 << 30
GRAPH_CALLS = 20
GRAPH_REPLAYS = 50
# Of the norm of the error to the norm of the result; a peer may round x * rstd before it multiplies by the weight, and
# float32 sums over rows depend on their order.
TOLERANCES = {"bfloat16": (5e-3, 5e-3), "float32": (1e-5, 1e-4)}
EIGHT_BITS_TOLERANCE = 4e-2
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

EXAMPLES = """examples:
  python3 benchmarks/bandwidth.py --compile --json bandwidth.json --plot bandwidth.png
  python3 benchmarks/bandwidth.py --quick --only rms_norm_backward,layer_norm_backward --dtype bfloat16
  python3 benchmarks/bandwidth.py --quick --models --json models.json
  python3 benchmarks/bandwidth.py --quick --types
  python3 benchmarks/bandwidth.py --from-json bf16.json fp32.json --plot both.png   # measures nothing: two runs as one
"""


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


# ---- Arrays and what is expected of them -----------------------------------------------------------------------------


class Arrays(NamedTuple):
    """Of a call; those that its operator does not have are None."""

    x: Any
    other: Any  # the residual, or dy
    weight: Any
    bias: Any
    mean: Any
    rstd: Any
    softmax: Any  # what there is of it
    read: tuple[Any, ...]  # arrays of rows without gaps: what a copy of as many bytes reads
    dresidual: Any = None

    @property
    def columns(self) -> tuple[Any, ...]:
        return tuple(one for one in (self.weight, self.bias) if one is not None)


def make_arrays(torch: Any, case: Case) -> Arrays:
    def normal(*shape: int) -> Any:
        return torch.empty(shape, dtype=getattr(torch, case.dtype), device=DEVICE).normal_()

    centred = case.does.norm == "layer_norm"
    if case.does.norm == "softmax":
        given = softmax_cases.make(torch, case, normal, DEVICE)
        read = (given.x,) if given.dy is None else (given.x, given.dy)
        return Arrays(given.x, given.dy, None, None, None, None, given, read)
    if case.part:
        first, heads = PACKED[case.part]
        x = normal(case.rows, PACKED_HEADS, case.hidden)[:, first : first + heads]
    else:
        x = normal(case.rows, case.hidden)
    other = normal(*x.shape) if case.does.reads == 2 else None
    weight = normal(*((case.heads,) if case.per_head else ()), case.hidden)
    bias = normal(case.hidden) if centred else None
    mean = rstd = None
    if case.backward:
        values = x.float()
        if centred:
            mean = values.mean(-1)
            values = values - mean.unsqueeze(-1)
        rstd = torch.rsqrt(values.square().mean(-1) + EPS)
    contiguous = x.contiguous()
    dresidual = normal(*x.shape) if case.form == DRESIDUAL else None
    read = tuple(one for one in (contiguous, other, dresidual) if one is not None)
    return Arrays(x, other, weight, bias, mean, rstd, None, read, dresidual)


class Expected(NamedTuple):
    """Results in float64: of outputs of rows, some rows only."""

    some: Any
    rows: list[Any]
    columns: list[Any]


def expected(torch: Any, case: Case, arrays: Arrays) -> Expected:
    if case.does.norm == "softmax":
        rows = math.prod(case.matrix) * case.rows
        some = torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS), device=DEVICE).long()
        return Expected(some, *softmax_cases.expected(torch, case, some, arrays.softmax, DEVICE))
    weight, bias = arrays.weight.double(), 0.0 if arrays.bias is None else arrays.bias.double()

    def normalized(x: Any) -> tuple[Any, Any]:
        x = x.double()
        if case.does.norm == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * rstd, rstd

    some = torch.linspace(0, case.rows - 1, min(case.rows, CHECKED_ROWS), device=DEVICE).long()
    x, other = arrays.x[some], None if arrays.other is None else arrays.other[some]
    if case.does.way == "add before":
        total = x + other
        return Expected(some, [normalized(total)[0] * weight + bias, total.double()], [])
    x_hat, rstd = normalized(x)
    if not case.backward:
        return Expected(some, [x_hat * weight + bias + (0.0 if other is None else other.double())], [])
    g = other.double() * weight
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if case.does.norm == "layer_norm":
        dx = dx - g.mean(-1, keepdim=True)
    dweight = torch.zeros_like(weight)
    dbias = torch.zeros_like(weight)
    step = max(1, 2**24 // (case.heads * case.hidden))
    for first in range(0, case.rows, step):
        dy = arrays.other[first : first + step].double()
        dweight += (dy * normalized(arrays.x[first : first + step])[0]).sum_to_size(weight.shape)
        dbias += dy.sum_to_size(weight.shape)
    dx = rstd * dx
    if arrays.dresidual is not None:
        dx = dx + arrays.dresidual[some].double()
    return Expected(some, [dx], [dweight] if arrays.bias is None else [dweight, dbias])


def check(torch: Any, call: Callable[[], Any], case: Case, arrays: Arrays, wanted: Expected) -> str | None:
    """Return what is wrong with a provider's results, or None."""
    of_out = torch.empty_like(arrays.read[0], dtype=getattr(torch, case.out))
    of_columns = arrays.weight if arrays.softmax is None else arrays.softmax.gradients_of
    like = [of_out] * len(wanted.rows) + [of_columns] * len(wanted.columns)
    # NaNs in the memory that the allocator hands out next for arrays of these sizes.
    poisoned = [torch.full_like(one, 100 if case.out == "int8" else math.nan) for one in like]
    del poisoned
    found = call()
    found = found if isinstance(found, (tuple, list)) else (found,)
    torch.cuda.synchronize()
    scale = 1.0
    if case.by_row:
        *found, row_scale = found
        scale = row_scale[wanted.some].double().unsqueeze(-1)
    if len(found) != len(like):
        return f"{len(found)} results instead of {len(like)}"
    of_rows, of_others = TOLERANCES[case.dtype]
    if BYTES[case.out] == 1:
        of_rows = EIGHT_BITS_TOLERANCE
    exact = [(one, of_rows) for one in wanted.rows] + [(one, of_others) for one in wanted.columns]
    for number, (result, one, (reference, tolerance)) in enumerate(zip(found, like, exact, strict=True)):
        if result.shape != one.shape or result.dtype != one.dtype:
            return f"result {number}: {tuple(result.shape)} {result.dtype} for {tuple(one.shape)} {one.dtype}"
        if not bool(torch.isfinite(result.float()).all()):
            return f"result {number} has elements that are not finite"
        some = result
        if number < len(wanted.rows):
            some = (result.reshape(-1, case.hidden) if case.matrix else result)[wanted.some]
        deviation = float((some.double() * scale - reference).norm() / reference.norm())
        if not deviation <= tolerance:
            return f"result {number} has a relative error of {deviation:.1e}"
    return None


# ---- Providers: each returns (arrays) -> call, or raises -------------------------------------------------------------

Call = Callable[[], Any]
Bind = Callable[[Arrays], Call]
Maker = Callable[[Any, Case], Bind]


class UnsupportedError(Exception):
    """A provider does not have the operator."""


def ours(torch: Any, case: Case) -> Bind:
    function = getattr(transformer_rtc, case.operator)

    def bind(arrays: Arrays) -> Call:
        if case.does.norm == "softmax":
            return softmax_cases.ours(case, arrays.softmax)
        if not case.backward:
            rows = (arrays.x,) if arrays.other is None else (arrays.x, arrays.other)
            options: dict[str, Any] = {"out_dtype": getattr(torch, case.out)} if case.form else {}
            if case.by_row:
                options["row_scaling"] = True
            elif BYTES[case.out] == 1:
                options |= {name: torch.ones(1, device=DEVICE) for name in ("scale", "amax")}
            return functools.partial(function, *rows, *arrays.columns, EPS, **options)
        statistics = {"rstd": arrays.rstd} if arrays.mean is None else {"mean": arrays.mean, "rstd": arrays.rstd}
        if arrays.dresidual is not None:
            statistics["dresidual"] = arrays.dresidual
        return functools.partial(function, arrays.other, arrays.x, arrays.weight, EPS, **statistics)

    return bind


def ours_static(torch: Any, case: Case) -> Bind:
    def bind(arrays: Arrays) -> Call:
        call = ours(torch, case)(arrays)

        def using_static() -> Any:
            with transformer_rtc.using("static"):
                return call()

        return using_static

    return bind


def in_torch(torch: Any, case: Case) -> Callable[..., Any]:
    """Return the operator, or the one whose gradient it is, in torch's operators."""
    norm = getattr(torch.nn.functional, case.does.norm)
    shape = (case.hidden,)

    def plain(x: Any, *columns: Any) -> Any:
        return norm(x, shape, *columns, EPS)

    def per_head(x: Any, weight: Any) -> Any:
        return norm(x, shape, None, EPS) * weight

    def add_before(x: Any, residual: Any, *columns: Any) -> Any:
        total = x + residual
        return norm(total, shape, *columns, EPS), total

    def add_after(x: Any, residual: Any, *columns: Any) -> Any:
        return residual + norm(x, shape, *columns, EPS)

    def to_form(x: Any, *columns: Any) -> Any:
        out = getattr(torch, case.out)
        y = plain(x, *columns).float()
        if BYTES[case.out] > 1:
            return y.to(out)
        largest = 127.0 if case.out == "int8" else torch.finfo(out).max
        amax = y.abs().amax(-1, keepdim=True) if case.by_row else y.abs().amax()
        if not case.by_row:
            return y.clamp(-largest, largest).to(out)  # by a scale of 1; amax is for the next call
        y = y * (largest / amax)
        return (y.round() if case.out == "int8" else y).to(out), (amax / largest).squeeze(-1)

    if case.per_head:
        return per_head
    if case.form in FORMS:
        return to_form
    return {"add before": add_before, "add after": add_after}.get(case.does.way, plain)


def of_function(torch: Any, case: Case, function: Callable[..., Any]) -> Bind:
    """Bind a function to its arrays; for a backward case, the gradient of a call that is made here, untimed."""

    def bind(arrays: Arrays) -> Call:
        if not case.backward:
            rows = (arrays.x,) if arrays.other is None else (arrays.x, arrays.other)
            return functools.partial(function, *rows, *arrays.columns)
        leaves = [array.detach().requires_grad_() for array in (arrays.x, *arrays.columns)]
        with torch.enable_grad():
            y = function(*leaves)
        return lambda: torch.autograd.grad(y, leaves, arrays.other, retain_graph=True)

    return bind


def softmax_in_torch(torch: Any, case: Case, wrap: Callable[[Any], Any]) -> Bind:
    return lambda arrays: softmax_cases.in_torch(torch, case, arrays.softmax, wrap)


def torch_eager(torch: Any, case: Case) -> Bind:
    if case.does.norm == "softmax":
        return softmax_in_torch(torch, case, lambda function: function)
    aten, shape = torch.ops.aten, [case.hidden]
    plain = of_function(torch, case, in_torch(torch, case))

    def layer_norm_backward(arrays: Arrays) -> Call:
        _, mean, rstd = aten.native_layer_norm(arrays.x, shape, *arrays.columns, EPS)
        operands = (arrays.other, arrays.x, shape, mean, rstd, *arrays.columns, [True] * 3)
        return added(arrays, functools.partial(aten.native_layer_norm_backward, *operands))

    def rms_norm_backward(arrays: Arrays) -> Call:
        with suppress(AttributeError, RuntimeError):  # a torch without these operators
            _, rstd = aten._fused_rms_norm(arrays.x, shape, arrays.weight, EPS)
            operands = (arrays.other, arrays.x, shape, rstd, arrays.weight, [True] * 2)
            call = functools.partial(aten._fused_rms_norm_backward, *operands)
            call()
            return added(arrays, call)
        return added(arrays, plain(arrays))

    def added(arrays: Arrays, call: Call) -> Call:
        if arrays.dresidual is None:
            return call

        def with_dresidual() -> Any:
            dx, *others = call()
            return dx.add_(arrays.dresidual), *others

        return with_dresidual

    if not case.backward or case.per_head:
        return plain
    return layer_norm_backward if case.does.norm == "layer_norm" else rms_norm_backward


def torch_compiled(torch: Any, case: Case) -> Bind:
    torch._dynamo.reset()  # else the compiles of earlier shapes count against its limit of recompiles
    with suppress(Exception):  # a compiled gradient is asked for again and again, and must keep what it saved
        import torch._functorch.config as functorch

        functorch.donated_buffer = False
    if case.does.norm == "softmax":
        return softmax_in_torch(torch, case, functools.partial(torch.compile, dynamic=False))
    return of_function(torch, case, torch.compile(in_torch(torch, case), dynamic=False))


def liger(torch: Any, case: Case) -> Bind:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if case.does.norm == "softmax":
        if case.matrix or case.operator.startswith("log_"):
            raise UnsupportedError
        return lambda arrays: softmax_cases.in_liger(case, arrays.softmax)
    refuse_all_but_plain(case)
    if case.kind == "small" and case.backward:
        raise UnsupportedError  # its backward ends a capture, and what follows in this process fails
    if case.does.norm == "layer_norm":
        return of_function(torch, case, lambda x, *columns: LigerLayerNormFunction.apply(x, *columns, EPS))
    call = LigerRMSNormFunction.apply
    return of_function(torch, case, lambda x, weight: call(x, weight, EPS, 0.0, "llama", False))


def quack(torch: Any, case: Case) -> Bind:
    from quack.rmsnorm import rmsnorm

    refuse_all_but_plain(case)
    if case.does.norm == "layer_norm":
        raise UnsupportedError  # it takes float32 weights only
    return of_function(torch, case, lambda x, weight: rmsnorm(x, weight, eps=EPS))


def transformer_engine(torch: Any, case: Case) -> Bind:
    from transformer_engine import pytorch

    refuse_all_but_plain(case)
    make = {"rms_norm": pytorch.RMSNorm, "layer_norm": pytorch.LayerNorm}[case.does.norm]
    module = make(case.hidden, eps=EPS, dtype=getattr(torch, case.dtype), device=DEVICE)

    def call(x: Any, *columns: Any) -> Any:
        module._parameters.update(zip(("weight", "bias"), columns, strict=False))
        return module(x)

    return of_function(torch, case, call)


def refuse_all_but_plain(case: Case) -> None:
    if case.per_head or case.form or case.does.way.startswith("add") or case.does.norm == "softmax":
        raise UnsupportedError


PROVIDERS: dict[str, Maker] = {
    OURS: ours,
    STATIC: ours_static,
    TORCH: torch_eager,
    COMPILED: torch_compiled,
    "Liger": liger,
    "quack": quack,
    "TE": transformer_engine,
}


def importable(torch: Any, with_compile: bool) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return the providers that this machine has, and why the others are absent."""
    found, absent = {}, {}
    for name, make in PROVIDERS.items():
        if name == STATIC and STATIC not in transformer_rtc.implementations(transformer_rtc.rms_norm):
            absent[name] = "this installation has no static kernels for this GPU"
        elif name == COMPILED and not with_compile:
            absent[name] = "measured with --compile"
        else:
            try:
                make(torch, Case("rms_norm", "shape", "bfloat16", 1, 256))
                found[name] = make
            except Exception as error:  # of an import, that can fail in any way
                absent[name] = reason(error)
    return found, absent


# ---- Copies: the ceiling ---------------------------------------------------------------------------------------------


def stream(torch: Any, case: Case, vectors: int) -> Bind:
    if case.form:
        raise UnsupportedError
    does = case.does
    kernel = common.stream_kernel(does.reads, does.writes, vectors)
    count = case.row_bytes // 16
    launch = LaunchConfig((-(-count // (common.STREAM_THREADS * vectors)), 1, 1), (common.STREAM_THREADS, 1, 1))

    def bind(arrays: Arrays) -> Call:
        read = {f"in{index}": array.data_ptr() for index, array in enumerate(arrays.read)}

        def call() -> Any:
            outputs = [torch.empty_like(arrays.read[0]) for _ in range(does.writes)]
            written = {f"out{index}": array.data_ptr() for index, array in enumerate(outputs)}
            values = {**read, **written, "vectors": count}
            kernel.launch(launch, values, torch.cuda.current_stream().cuda_stream)
            return outputs

        return call

    return bind


def torch_copy(torch: Any, case: Case) -> Bind:
    def bind(arrays: Arrays) -> Call:
        if len(arrays.read) == 3:
            return lambda: torch.addcmul(*arrays.read)
        if len(arrays.read) == 2:
            return lambda: torch.add(*arrays.read)
        out = getattr(torch, case.out)
        return lambda: torch.empty_like(arrays.read[0], dtype=out).copy_(arrays.read[0])

    if case.does.writes == 2:
        raise UnsupportedError
    return bind


COPIES: dict[str, Maker] = {
    f"{COPY}torch": torch_copy,
    **{
        f"{COPY}{vectors} vectors a thread": functools.partial(stream, vectors=vectors)  # as many loads in flight
        for vectors in (2, 4)
    },
}


# ---- Measurement -----------------------------------------------------------------------------------------------------


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Provided:
    """The providers of a case, but for those that fail."""

    def __init__(self, torch: Any, case: Case, makers: Mapping[str, Maker]) -> None:
        self._torch, self._case = torch, case
        self._binds: dict[str, Bind] = {}
        self.failures: dict[str, str] = {}
        for name, make in makers.items():
            if name != COMPILED or case.compiled:
                try:
                    self._binds[name] = make(torch, case)
                except UnsupportedError:
                    continue
                except Exception as error:  # a peer may refuse a case in any way
                    self.failures[name] = reason(error)

    def calls(self, arrays: Arrays, wanted: Expected | None = None) -> dict[str, Call]:
        """Return each provider's call; with `wanted`, only of those whose results are right."""
        found: dict[str, Call] = {}
        for name, bind in list(self._binds.items()):
            try:
                call = bind(arrays)
                problem = None
                if wanted is not None and name.startswith(COPY):
                    call()
                    self._torch.cuda.synchronize()
                elif wanted is not None:
                    problem = check(self._torch, call, self._case, arrays, wanted)
            except Exception as error:
                problem = reason(error)
            if problem:
                self.failures[name] = problem
                del self._binds[name]
            else:
                found[name] = call
        return found


def measure(
    torch: Any, case: Case, makers: Mapping[str, Maker], placements: int, repetitions: int, flush: common.L2Flush
) -> dict[str, Any]:
    provided = Provided(torch, case, {**makers, **COPIES})
    measured: list[dict[str, Any]] = []
    held = []
    for placement in range(placements):
        arrays = make_arrays(torch, case)
        calls = provided.calls(arrays, expected(torch, case, arrays) if placement == 0 else None)
        common.time_rotated(torch, calls, WARM_UP, flush)
        times = common.time_rotated(torch, calls, repetitions, flush)
        measured.append({name: common.spread(values) for name, values in times.items()})
        # Keeps this placement's inputs, and takes the memory its outputs had: the next one is elsewhere.
        held.append((arrays, torch.empty_like(arrays.read[0])))
    return {"us_by_placement": measured, "failures": provided.failures}


def measure_small(torch: Any, case: Case, makers: Mapping[str, Maker]) -> dict[str, Any]:
    """Return device us per call of a captured graph's replays."""
    provided = Provided(torch, case, makers)
    arrays = make_arrays(torch, case)
    replays: dict[str, Call] = {}
    graphs = []
    for name, call in provided.calls(arrays, expected(torch, case, arrays)).items():
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(GRAPH_CALLS):
                    call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            provided.failures[name] = reason(error)
            continue
        graphs.append(graph)
        replays[name] = graph.replay
    times = common.time_rotated(torch, replays, GRAPH_REPLAYS, lambda _: torch.cuda.synchronize())
    per_call = {name: common.spread([time / GRAPH_CALLS for time in values]) for name, values in times.items()}
    return {"us_by_placement": [per_call], "failures": provided.failures}


def measure_all(torch: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    placements, repetitions = (1, 8) if arguments.quick else (2, 20)
    makers, absent = importable(torch, arguments.compile)
    flush = common.L2Flush(torch, FLUSH_BYTES)
    for value in range(AWAKE):
        flush(value)
    result: dict[str, Any] = {
        "environments": [common.environment()],
        "placements": placements,
        "repetitions": repetitions,
        "absent": absent,
        "cases": [],
    }
    if arguments.models or arguments.types:
        makers = {name: make for name, make in makers.items() if name in (OURS, TORCH)}
    choose = model_cases if arguments.models else typed_cases if arguments.types else cases
    found = choose(arguments.only, arguments.dtype)
    progress = tqdm(found, desc="bandwidth", unit="case")
    for case in progress:
        progress.set_postfix_str(f"{case.operator} {case.dtype} {case.shape}")
        broken = False
        try:
            if case.kind == "small":
                measured = measure_small(torch, case, makers)
            else:
                measured = measure(torch, case, makers, placements, repetitions, flush)
        except Exception as error:  # such as of memory: the next case may well fit
            measured = {"us_by_placement": [], "failures": {"the case": reason(error)}}
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:  # a kernel has failed, and this process can launch no more
            measured["failures"]["the process"] = reason(error)
            broken = True
        result["cases"].append({"case": case._asdict(), **measured})
        common.write_json(arguments.json, result)
        if broken:
            break
    return result


# ---- Report ----------------------------------------------------------------------------------------------------------


class Measured:
    """A case's times, and what follows from them."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.case = Case(**found["case"])
        self.failures: dict[str, str] = found["failures"]
        self._placements: list[dict[str, dict[str, float]]] = found["us_by_placement"]
        self.names = list(dict.fromkeys(name for placement in self._placements for name in placement))

    def times(self, provider: str) -> dict[str, float] | None:
        """Return a provider's times at its best placement."""
        found = [placement[provider] for placement in self._placements if provider in placement]
        return min(found, key=lambda times: times["median"]) if found else None

    def speed(self, provider: str) -> float | None:
        """Return GB/s."""
        times, case = self.times(provider), self.case
        moved = case.copied_bytes if provider.startswith(COPY) else case.moved_bytes
        return moved / times["median"] / 1e3 if times else None

    @property
    def ceiling(self) -> float | None:
        return max((self.speed(name) or 0.0 for name in self.names if name.startswith(COPY)), default=None)

    @property
    def best_peer(self) -> str | None:
        peers = [name for name in self.names if name not in (OURS, STATIC) and not name.startswith(COPY)]
        return max(peers, key=lambda name: self.speed(name) or 0.0, default=None)

    def ratio(self, provider: str) -> float | None:
        """Return the speed to the ceiling's."""
        speed, ceiling = self.speed(provider), self.ceiling
        return speed / ceiling if speed and ceiling else None


def form(value: float | None, how: str) -> str | None:
    return None if value is None else format(value, how)


def spread_of(times: dict[str, float] | None) -> str | None:
    return times and f"{(times['p90'] - times['p10']) / times['median']:.1%}"


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return runs that measured alike, such as of one dtype each, as one; of a case, what its last run measured."""
    first, *others = results
    for other in others:
        if any(other[name] != first[name] for name in ("placements", "repetitions")):
            raise SystemExit("--from-json: the runs have other numbers of placements or repetitions")
    environments = [environment for result in results for environment in result["environments"]]
    cases = {str(found["case"]): found for result in results for found in result["cases"]}
    absent = {name: why for result in results for name, why in result["absent"].items()}
    return {**first, "environments": environments, "absent": absent, "cases": list(cases.values())}


def print_report(result: dict[str, Any]) -> None:
    for environment in result["environments"]:
        common.print_environment(environment)
    every = [Measured(found) for found in result["cases"]]
    large = [one for one in every if one.case.kind != "small"]
    small = [one for one in every if one.case.kind == "small"]
    extra = [name for name in PROVIDERS if name not in (OURS, TORCH) and any(name in one.names for one in every)]
    rows: list[tuple[object, ...]] = []
    for one in large:
        peer, mine = one.best_peer, one.speed(OURS)
        theirs = one.speed(peer) if peer else None
        rows.append(
            (
                one.case.operator,
                one.case.dtype,
                one.case.shape,
                form(mine, ".0f"),
                form(one.ratio(OURS), ".3f"),
                form(mine / theirs if mine and theirs else None, ".2f"),
                peer,
                spread_of(one.times(OURS)),
                form(one.ceiling, ".0f"),
                *(form(one.speed(name), ".0f") for name in (TORCH, *extra)),
            )
        )
    if rows:
        headings = ("operator", "dtype", "shape", "GB/s", "/ ceiling", "/ best peer", "best peer", "p10-p90")
        print(common.table((*headings, "ceiling", TORCH, *extra), rows))
        print(
            f"\nof each provider and case: the median of {result['repetitions']} at the best of {result['placements']} "
            "placements; the L2 flushed before every launch; every provider allocates its outputs\n"
        )
    rows = []
    for one in small:
        mine, theirs = one.times(OURS), one.times(TORCH)
        rows.append(
            (
                one.case.operator,
                one.case.dtype,
                one.case.shape,
                *(form((one.times(name) or {}).get("median"), ".2f") for name in (OURS, TORCH, *extra)),
                form(theirs["median"] / mine["median"] if mine and theirs else None, ".2f"),
                spread_of(mine),
            )
        )
    if rows:
        print(common.table(("operator", "dtype", "shape", OURS, TORCH, *extra, "x torch", "p10-p90"), rows))
        print(f"\nus of the device per call, of {GRAPH_CALLS} in a captured graph, the L2 warm\n")
    print_verdict(large, result["absent"])
    failed: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for one in every:
        for failure in one.failures.items():
            failed[failure].append(f"{one.case.operator} {one.case.dtype} {one.case.shape}")
    for (name, problem), where in failed.items():
        print(f"FAILED: {name}: {problem}\n  {'; '.join(where)}")


def print_verdict(measured: Sequence[Measured], absent: Mapping[str, str]) -> None:
    aimed = [(one, one.case.target, one.ratio(OURS)) for one in measured if one.case.target]
    below = [(one.case, target, ratio) for one, target, ratio in aimed if ratio is None or ratio < (target or 0.0)]
    rows = [
        (case.operator, case.dtype, case.shape, form(ratio, ".3f"), target)
        for case, target, ratio in sorted(below, key=lambda row: (row[2] or 0.0) - (row[1] or 0.0))
    ]
    print(f"below the target: {len(below)} of {len(aimed)} cases")
    if rows:
        print(common.table(("operator", "dtype", "shape", "/ ceiling", "target"), rows))
    print()
    for name, why in absent.items():
        print(f"not measured: {name}: {why}")


def plot(result: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = [Measured(found) for found in result["cases"]]
    colors = {name: f"C{index}" for index, name in enumerate(PROVIDERS)}
    figure, axes = pyplot.subplot_mosaic(
        [
            ["rms_norm", "layer_norm"],
            ["rms_norm_backward", "layer_norm_backward"],
            ["softmax", "softmax_backward"],
            ["others", "others"],
        ],
        figsize=(14, 21),
    )
    sizes = [hidden for _, hidden in SHAPES]
    for operator in PLAIN:
        axis = axes[operator]
        for dtype, line in (("bfloat16", "-"), ("float32", "--")):
            shapes = [
                one for one in every if (one.case.operator, one.case.kind, one.case.dtype) == (operator, "shape", dtype)
            ]
            for name in (OURS, TORCH, COMPILED):
                points = [(one.case.hidden, one.ratio(name)) for one in shapes if one.ratio(name)]
                if points:
                    label = f"{name}, {dtype}"
                    axis.plot(
                        *zip(*points, strict=True), line, marker="o", markersize=4, color=colors[name], label=label
                    )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes], rotation=30)
        axis.set(xlabel="hidden size", title=operator)
    axis = axes["others"]
    drawn = [("shape", operator) for operator in PLAIN]
    others = [one for one in every if one.case.kind != "small" and (one.case.kind, one.case.operator) not in drawn]
    names = [name for name in (OURS, TORCH, COMPILED) if any(name in one.names for one in others)]
    for index, name in enumerate(names):
        width = 0.8 / len(names)
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(others))]
        axis.bar(places, [one.ratio(name) or 0.0 for one in others], width, color=colors[name], label=name)
    labels = [f"{one.case.operator}, {one.case.dtype}, {one.case.shape}" for one in others]
    axis.set_xticks(range(len(others)), labels, fontsize=6, rotation=90)
    axis.margins(x=0.01)
    axis.set_title("ragged rows, heads inside a packed qkv, residuals, log_softmax, softmax of matrices")
    for axis in axes.values():
        axis.axhline(1.0, color="black", linewidth=1, alpha=0.5)
        axis.set(ylabel="bandwidth / best copy", ylim=(0, None))
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(result: dict[str, Any], plot_path: str | None) -> None:
    print_report(result)
    if plot_path:
        plot(result, plot_path)


def one_of(known: Mapping[str, str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not of {', '.join(known)}")
        return list(dict.fromkeys(known[name] for name in text.split(",")))

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    operators = one_of({name: name for name in OPERATORS})
    dtypes = one_of({"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"})
    parser.add_argument(
        "--only", type=operators, default=list(OPERATORS), metavar="NAME[,NAME]", help="operators; default: all"
    )
    parser.add_argument(
        "--dtype", type=dtypes, default=list(TOLERANCES), metavar="NAME[,NAME]", help="bf16, fp32; default: both"
    )
    parser.add_argument(
        "--models", action="store_true", help="sizes of well-known models and odd lengths instead, beside torch alone"
    )
    parser.add_argument(
        "--types", action="store_true", help="y of other types than x, and dresidual, instead, beside torch alone"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, at one placement")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile too, on a few shapes: a minute or two more"
    )
    parser.add_argument("--json", metavar="FILE", help="write every median and spread there")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratio to the ceiling; needs matplotlib")
    parser.add_argument(
        "--from-json",
        nargs="+",
        metavar="FILE",
        help="report on what runs with --json wrote, a later one's cases instead of an earlier one's; measure nothing",
    )
    arguments = parser.parse_args()
    if arguments.from_json:
        runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in arguments.from_json]
        report(joined(runs), arguments.plot)
        return
    if arguments.models + arguments.types + arguments.compile > 1:
        parser.error("--models and --types measure torch alone, and each other's cases not: one of them, or --compile")
    if arguments.models and not model_cases(arguments.only, arguments.dtype):
        parser.error(f"--models has no case of {', '.join(arguments.only)}: of {', '.join(PLAIN)}")
    if arguments.types and not typed_cases(arguments.only, arguments.dtype):
        parser.error(f"--types has no case of {', '.join(arguments.only)}: of {', '.join(PLAIN[:4])}")
    torch = common.torch_on_gpu()
    with torch.no_grad():
        result = measure_all(torch, arguments)
    report(result, arguments.plot)
    if any(
        name in found["failures"] for found in result["cases"] for name in (OURS, STATIC, "the case", "the process")
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
