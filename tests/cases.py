"""The one table of cases: numerics, compiles and simulation take theirs from here."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from transformer_rtc.dispatch import LaunchRule
from transformer_rtc.ops import norms
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32, DeviceLimits, DType, KernelSpec

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
FAMILY = norms._RMS_NORM.family


class Case(NamedTuple):
    """A call of rms_norm, but for its values."""

    rows: int
    hidden: int
    x: DType
    weight: DType | None
    out: DType
    rstd: bool

    @property
    def plain(self) -> bool:
        """Whether it has one data type and no option."""
        return self.x is self.weight is self.out and not self.rstd

    @property
    def name(self) -> str:
        types = "-".join(dtype.symbol if dtype else "none" for dtype in (self.x, self.weight, self.out))
        return f"{self.rows}x{self.hidden}-{types}{'-rstd' if self.rstd else ''}"

    def specialise(self, limits: DeviceLimits) -> tuple[KernelSpec, LaunchRule]:
        dtypes = {"x": self.x, "weight": self.weight, "out": self.out, "rstd": FLOAT32 if self.rstd else None}
        return FAMILY.specialise(dtypes, self.hidden, limits)


# One column, primes, powers of two and their neighbours, hidden sizes of well-known models, rows for several CTAs.
HIDDEN = (
    *(1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 61, 64, 80, 100, 127, 128, 129, 251, 256, 257, 509, 512, 513),
    *(768, 896, 1000, 1021, 1024, 1152, 1600, 2048, 2304, 2560, 3072, 3584, 4096, 4097, 5120, 6144, 7168, 8192),
    *(12288, 14336, 16384, 16385, 16411, 32768, 50257, 65536, 131071, 262144, 1048576, 1048577),
)
COMBINATIONS = tuple(itertools.product(FLOATS, (*FLOATS, None), FLOATS, (False, True)))
_ROWS = (1, 2, 3, 37, 130, 517)
_MOST_ELEMENTS = 1 << 21


def _cases() -> tuple[Case, ...]:
    rows = itertools.cycle(_ROWS)
    combinations = itertools.cycle(COMBINATIONS)
    found = []
    for hidden in HIDDEN:
        types = [(dtype, dtype, dtype, False) for dtype in FLOATS] + list(itertools.islice(combinations, 3))
        for x, weight, out, rstd in types:
            found.append(Case(max(1, min(next(rows), _MOST_ELEMENTS // hidden)), hidden, x, weight, out, rstd))
    return tuple(found)


CASES = _cases()


def compiled_cases(architecture: int) -> list[Case]:
    """Return cases for every hidden size; the architectures share out the combinations of types."""
    turn = list(ARCHITECTURES).index(architecture)
    return [
        case
        for number, case in enumerate(CASES)
        if (case.plain and case.x is not FLOAT16) or (number + turn) % len(ARCHITECTURES) == 0
    ]
