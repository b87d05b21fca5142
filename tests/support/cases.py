# SPDX-License-Identifier: Apache-2.0
"""The one table of cases: numerics, compiles and simulation take theirs from here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformer_rtc.declaration import declaration_of
from transformer_rtc.ops.norm.config import NormConfig
from transformer_rtc.request import LaunchRule, Request, StaticKernel
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    INT8,
    DeviceLimits,
    DType,
    KernelSpec,
)

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
FLOAT8 = (FLOAT8_E4M3, FLOAT8_E5M2)
FORWARD = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add")
BACKWARD = ("rms_norm_backward", "layer_norm_backward")
NORMS = (*FORWARD, *BACKWARD)  # a test holds them to be all of the family
FAMILY = declaration_of("rms_norm").family
DELAYED = ("scale", "amax", "scale_inv")  # TransformerEngine's
BY_ROW = ("row_scale",)


class Case(NamedTuple):
    """A call of an operator, but for its values. A type of None: there is no such array, or it is not asked for."""

    rows: int  # where there are heads, tokens * heads
    hidden: int
    x: DType
    weight: DType | None
    out: DType | None
    rstd: bool = False  # whether it is returned, or, to a backward operator, given
    operator: str = "rms_norm"
    bias: DType | None = None
    residual: DType | None = None  # the dresidual of a backward operator
    dy: DType | None = None
    dweight: DType | None = None
    dbias: DType | None = None
    mean: bool = False
    scaling: tuple[str, ...] = ()  # those of DELAYED that are given, or BY_ROW
    heads: int = 0  # with a weight and bias of their own; 0: all rows have the same
    margin: int = 0  # multiprocessors to leave free
    weight_offset: float = 0.0
    sum: DType | None = None  # of x and the residual before a norm; None: the residual's
    rounds: bool = False  # x * rstd before the weight
    label: str = ""  # what the case stands for

    @property
    def backward(self) -> bool:
        return self.operator in BACKWARD

    @property
    def centred(self) -> bool:
        return "layer_norm" in self.operator

    @property
    def adds(self) -> str:
        """Where the residual is added, as a forward kernel has it."""
        return "before" if self.operator.startswith("add_") else "after" if self.operator.endswith("_add") else ""

    @property
    def plain(self) -> bool:
        """Whether it is an rms_norm of one data type without an option."""
        return self == Case(self.rows, self.hidden, self.x, self.x, self.x, weight_offset=self.weight_offset)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of x."""
        if self.heads == 0:
            return self.rows, self.hidden
        return self.rows // self.heads, self.heads, self.hidden

    @property
    def columns(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.shape[1:] if self.heads else self.shape[-1:]

    @property
    def types(self) -> dict[str, DType | None]:
        """The data type of each array of the call, as a `Request` has it."""
        if self.backward:
            of = {
                "dy": self.dy or self.x, "x": self.x, "weight": self.weight, "mean": FLOAT32 if self.rstd else None,
                "rstd": FLOAT32 if self.rstd else None, "dresidual": self.residual, "out": self.out,
                "dweight": self.dweight, "dbias": self.dbias,
            }  # fmt: skip
        else:
            of = {
                "x": self.x, "residual": self.residual, "weight": self.weight, "bias": self.bias, "out": self.out,
                "residual_out": self.sum or self.residual, "mean": FLOAT32 if self.mean else None,
                "rstd": FLOAT32 if self.rstd else None,
                **{name: FLOAT32 if name in self.scaling else None for name in (*DELAYED, *BY_ROW)},
            }  # fmt: skip
        return {argument.name: of[argument.name] for argument in declaration_of(self.operator).arguments
                if argument.name in of}  # fmt: skip

    @property
    def name(self) -> str:
        parts = [self.label] if self.label else []
        parts += [self.operator, "x".join(map(str, self.shape)), self.x.symbol]
        inputs = {"w": self.weight, "b": self.bias, "r": self.residual, "s": self.sum, "dy": self.dy}
        for name, dtype in inputs.items():
            parts += [f"{name}_{dtype.symbol}"] if dtype else []
        parts.append(self.out.symbol if self.out else "none")
        for name, dtype in (("dw", self.dweight), ("db", self.dbias)):
            parts += [f"{name}_{dtype.symbol}"] if dtype else []
        parts += [name for name, value in (("rounds", self.rounds), ("mean", self.mean), ("rstd", self.rstd)) if value]
        parts += self.scaling
        parts += [name for name, value in (("heads", self.heads), ("margin", self.margin)) if value]
        if self.weight and self.weight_offset:
            parts.append("zero_centred" if self.weight_offset == 1 else f"offset{self.weight_offset:g}")
        return "-".join(parts)

    @property
    def request(self) -> Request:
        flags = frozenset({"round_before_weight"} if self.rounds else ())
        return Request(self.operator, self.types, self.hidden, self.heads > 0, self.margin > 0, flags)

    def stages(
        self, limits: DeviceLimits, config: NormConfig | None = None
    ) -> tuple[tuple[KernelSpec, LaunchRule], ...]:
        """Return its launches, by a configuration or by the default one."""
        return FAMILY.specialise(self.request, limits, config)

    def specialise(self, limits: DeviceLimits) -> tuple[Any, LaunchRule]:
        """Return the launch over the rows."""
        return self.stages(limits)[0]

    def general_stages(self) -> tuple[tuple[StaticKernel, LaunchRule], ...]:
        return FAMILY.static(self.request)

    def general(self) -> tuple[StaticKernel, LaunchRule]:
        """Return the launch over the rows of the general kernels."""
        return self.general_stages()[0]

    def shorter(self, elements: int, most: int = 1 << 30) -> Case:
        """Return the case with at most so many elements, and rows."""
        heads = max(1, self.heads)
        return self._replace(rows=max(1, min(self.rows, most, elements // self.hidden) // heads) * heads)


def layout_of(case: Case, limits: DeviceLimits) -> str:
    """Return how a specialised kernel holds a case's rows."""
    spec, _ = case.specialise(limits)
    config = spec.config
    if case.backward and not config.stages:
        return "wide"
    if config.threads_per_row <= 32:
        return "warps"
    held = "shared" if config.in_shared else "chunked" if spec.chunks > 1 else "registers"
    if config.stages and not case.backward:
        held = "in turn"
    if config.rows_per_pass > 1:
        held = "together"
    if case.hidden % 4 != 0:  # 16 bytes divide no row
        held = "padded"
    return held if config.ctas_per_row == 1 else f"{held} {config.exchange}"


# The hidden sizes that TransformerEngine's LayerNorm and RMSNorm kernels are tuned for, and its types (weight, input,
# output): those of tuned kernels, and those that its general ones have besides. float8 has scale, amax and scale_inv.
# It tests rows x columns that no tuned kernel has, too.
TE_LAYER_NORM = (
    *(768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 15360, 16384, 18432),
    *(20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
)
TE_RMS_NORM = (512, 768, 1024, 2048, 4096, 8192)
TE_TYPES = (
    (FLOAT32, FLOAT32, FLOAT32),
    (FLOAT16, FLOAT16, FLOAT16),
    (BFLOAT16, BFLOAT16, BFLOAT16),
    (FLOAT32, FLOAT32, FLOAT16),
    (FLOAT32, FLOAT32, BFLOAT16),
    (BFLOAT16, BFLOAT16, FLOAT8_E4M3),
)
TE_GENERAL_TYPES = (
    (FLOAT32, FLOAT32, FLOAT8_E4M3),
    (FLOAT16, FLOAT16, FLOAT8_E4M3),
    (BFLOAT16, BFLOAT16, FLOAT32),
    (FLOAT16, FLOAT16, FLOAT32),
    (BFLOAT16, BFLOAT16, FLOAT16),
    (FLOAT16, FLOAT16, BFLOAT16),
    (BFLOAT16, BFLOAT16, FLOAT8_E5M2),
)
TE_GENERAL_SHAPES = ((71, 229), (29, 541))

# One column, primes, powers of two and their neighbours, hidden sizes of well-known models, rows for several CTAs.
HIDDEN = (
    *(1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 61, 64, 80, 96, 100, 127, 128, 129, 251, 256, 257, 509, 512, 513),
    *(768, 896, 1000, 1021, 1024, 1152, 1600, 2048, 2304, 2560, 3072, 3584, 4096, 4097, 5120, 6144, 7168, 8192),
    *(12288, 14336, 16384, 16385, 16411, 32768, 50257, 65536, 131071, 262144, 1048576, 1048577),
)
_ROWS = (1, 2, 3, 37, 130, 517)
_MOST_ELEMENTS = 1 << 21


def _transformer_engine() -> Iterator[Case]:
    """Yield each of its hidden sizes with half of its types; a weight that is stored around zero is every other one.

    Backward adds a gradient to dx in every other one.
    """
    for operator, sizes in (("layer_norm", TE_LAYER_NORM), ("rms_norm", TE_RMS_NORM)):
        centred = operator == "layer_norm"
        shapes = [
            *((max(1, min(_ROWS[n % len(_ROWS)], _MOST_ELEMENTS // hidden)), hidden) for n, hidden in enumerate(sizes)),
            *TE_GENERAL_SHAPES,
        ]
        for number, (rows, hidden) in enumerate(shapes):
            forward = [TE_TYPES[(number + 2 * turn) % len(TE_TYPES)] for turn in range(3)]
            forward.append(TE_GENERAL_TYPES[number % len(TE_GENERAL_TYPES)])
            for turn, (weight, x, out) in enumerate(forward):
                yield Case(
                    rows, hidden, x, weight, out, rstd=True, operator=operator, bias=weight if centred else None,
                    mean=centred, scaling=DELAYED if out in FLOAT8 else (), weight_offset=(number // 2 + turn) % 2,
                    label="te",
                )  # fmt: skip
            for turn in range(2):
                weight, x, dy = TE_TYPES[(number + turn) % (len(TE_TYPES) - 1)]
                yield Case(
                    rows, hidden, x, weight, x, rstd=True, operator=f"{operator}_backward", dy=dy, dweight=weight,
                    dbias=weight if centred else None, weight_offset=(number + turn) % 2,
                    residual=x if (number + turn) // 2 % 2 else None, label="te",
                )  # fmt: skip


def scaled_rows() -> Iterator[Case]:
    """Yield cases of rows with a scale of their own, short ones and those that clusters share."""
    outputs = itertools.cycle((*FLOAT8, INT8))
    for norm, dtype, sizes in (
        ("rms_norm", BFLOAT16, (8192,)),
        ("rms_norm", FLOAT32, (8192, 16384, 32768, 65536, 131072)),
        ("layer_norm", BFLOAT16, (4096, 6144, 8192, 16384, 32768, 131072)),
        ("layer_norm", FLOAT32, (8192, 16384)),
    ):
        for hidden in sizes:
            yield Case(
                max(1, min(5, _MOST_ELEMENTS // hidden)), hidden, dtype, dtype, next(outputs), operator=norm,
                bias=dtype if norm == "layer_norm" else None, scaling=BY_ROW,
            )  # fmt: skip


def draw(hidden: int, backward: bool, drawn: random.Random) -> Case:
    """Draw an operator, types and options."""

    def any_of(choices: Sequence[Any]) -> Any:
        return choices[int(drawn.random() * len(choices))]

    def perhaps() -> bool:
        return drawn.random() < 0.5

    operator, heads = any_of(BACKWARD if backward else FORWARD), any_of((0, 0, 1, 3))
    rows = max(1, min(any_of(_ROWS), _MOST_ELEMENTS // hidden) // max(1, heads)) * max(1, heads)
    x, weight = any_of(FLOATS), any_of((*FLOATS, None))
    case = Case(
        rows, hidden, x, weight, x, perhaps(), operator, heads=heads, margin=any_of((0, 0, 1)),
        weight_offset=any_of((0.0, 1.0, 0.5)),
    )  # fmt: skip
    if case.backward:
        wanted = any_of(((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (1, 1, 1)))
        of_columns = any_of(FLOATS)
        return case._replace(
            out=any_of(FLOATS) if wanted[0] else None,
            dweight=of_columns if wanted[1] else None,
            dbias=of_columns if wanted[2] else None,
            dy=any_of(FLOATS),
            residual=any_of((*FLOATS, None)),
            # Heads are those of a weight; the sums have none without one.
            heads=heads if weight else 0,
        )
    out, bias = any_of(FLOATS if case.adds == "after" else (*FLOATS, *FLOAT8, INT8)), any_of((*FLOATS, None))
    scaling = any_of(((), ("scale",), ("amax",), ("scale", "scale_inv"), DELAYED, BY_ROW)) if out in FLOAT8 else ()
    return case._replace(
        out=out,
        bias=bias,
        residual=any_of(FLOATS) if case.adds else None,
        mean=case.centred and perhaps(),
        scaling=BY_ROW if out is INT8 else scaling,
        heads=heads if weight or bias else 0,
    )


def features(case: Case) -> set[tuple[Any, ...]]:
    """Return what a case tries."""
    found: set[tuple[Any, ...]] = {("operator", case.operator), ("scaling", case.scaling, case.backward)}
    for name, dtype in case.types.items():
        if name not in (*DELAYED, *BY_ROW):
            found.add((name, dtype.name if dtype else None, case.backward))
    found |= {("heads", min(case.heads, 2), case.backward), ("margin", case.margin, case.backward)}
    found |= {("sum", case.sum, case.backward), ("rounds", case.rounds, case.backward)}
    found.add(("offset", case.weight is not None and case.weight_offset, case.backward))
    if case.backward:
        found.add(("wanted", case.out is None, case.dweight is None, case.dbias is None))
    return found


_PATIENCE = 60  # so many draws in a row that show nothing new end those of a size


def _others() -> Iterator[Case]:
    """Yield cases until every operator, type and option was tried with every layout, and both ways at every size.

    Every layout of a device with clusters; of one without, every operator, backward with statistics and without.
    """
    tried: set[tuple[Any, ...]] = set()
    for hidden in HIDDEN:
        drawn, last = random.Random(hidden), 0  # always the same cases
        for number in itertools.count():
            if number - last >= _PATIENCE:
                break
            case = draw(hidden, number % 2 == 1, drawn)
            layout = layout_of(case, ARCHITECTURES[90])
            new = {(layout, *feature) for feature in features(case)}
            new.add((layout_of(case, ARCHITECTURES[80]), "operator", case.operator, case.backward and case.rstd))
            if not new <= tried:
                last = number
            if number < 2 or last == number:
                tried |= new
                yield case


def _sums_and_rounding(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield forward cases with a sum of each type other than the residual's, and with a rounded product.

    Each layout and each general kernel has them.
    """
    tried: set[tuple[Any, ...]] = set()
    for case in (case for case in cases if not case.backward and case.adds != "after"):
        layout = layout_of(case, ARCHITECTURES[90])
        sums = [one for one in FLOATS if one is not case.residual and (layout, one) not in tried] if case.adds else []
        for sum_ in sums or [None]:
            one = case._replace(sum=sum_)
            general = one.general()[0].symbol
            held = one.types.get("residual_out") or one.x
            tries = {("rounds", layout), ("rounds", general)}
            rounds = not case.centred and held is not FLOAT32 and not tries <= tried
            if sum_ or rounds:
                tried |= {(layout, sum_), *(tries if rounds else ())}
                yield one._replace(rounds=rounds)


PLAIN = tuple(
    Case(rows, hidden, FLOATS[number % len(FLOATS)], FLOATS[number % len(FLOATS)], FLOATS[number % len(FLOATS)])
    for number, (rows, hidden) in enumerate(
        ((7, 1), (130, 64), (517, 128), (37, 1024), (130, 4096), (13, 4097), (37, 16384), (3, 65536), (2, 262144))
    )
)

# What no draw has: an amax alone, of rows that CTAs take in chunks.
_FIXED = [
    Case(1, 1 << 20, BFLOAT16, BFLOAT16, FLOAT8_E4M3, operator="add_rms_norm", residual=BFLOAT16, scaling=("amax",))
]
_SCALED = scaled_rows()
_OTHERS = tuple(_others())
_ALL = (*PLAIN, *_transformer_engine(), *_SCALED, *_FIXED, *_OTHERS, *_sums_and_rounding((*PLAIN, *_OTHERS)))
CASES = tuple({case.name: case for case in _ALL}.values())


def division_of(case: Case, limits: DeviceLimits) -> tuple[Any, ...]:
    """Return how a kernel divides a case's rows, but for the number of threads."""
    spec, _ = case.specialise(limits)
    config = spec.config
    return case.backward, layout_of(case, limits), config.ctas_per_row, config.stages
