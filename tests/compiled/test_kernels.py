# SPDX-License-Identifier: Apache-2.0
"""What NVRTC makes of the kernels: that they compile, and what they take of a device. No GPU is asked."""

from __future__ import annotations

import functools
import re
from itertools import chain, product

import pytest
from cases import CASES
from kernels import (
    Kernel,
    call,
    complaints,
    covering,
    general_kernels,
    kernels_of,
    ptx_of,
    softmax_requests,
    table,
    template_of,
)

from transformer_rtc.ops.norm.backward import BackwardSpec
from transformer_rtc.ops.softmax.config import BUCKETS
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT8_E4M3, FLOAT32, STATIC_ARCHITECTURES

# So many tests share the kernels of an architecture. Which a test compiles is found when it runs.
FIRST_GROUPS = 48
GROUPS = {architecture: 320 if architecture == 90 else 64 for architecture in STATIC_ARCHITECTURES}


@functools.cache
def first() -> list[Kernel]:
    """Return kernels that have all that any kernel has, for the architecture that the rule was fitted to."""
    return covering(table(90))


@functools.cache
def others(architecture: int) -> list[Kernel]:
    """Return the other kernels of an architecture."""
    already = set(first()) if architecture == 90 else set()
    return [kernel for kernel in table(architecture) if kernel not in already]


def assert_as_described(kernels: list[Kernel]) -> None:
    assert kernels
    wrong = list(chain.from_iterable(map(complaints, kernels)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", range(FIRST_GROUPS))
def test_a_kernel_of_every_kind_compiles_within_the_limits(group):
    assert_as_described(first()[group::FIRST_GROUPS])


@pytest.mark.thorough(share=0.25)
@pytest.mark.parametrize(
    ("architecture", "group"), [(architecture, n) for architecture, groups in GROUPS.items() for n in range(groups)]
)
def test_every_kernel_compiles_within_the_limits(architecture, group):
    assert_as_described(others(architecture)[group :: GROUPS[architecture]])


def test_the_first_kernels_are_of_every_template_and_exchange_and_of_both_tiers():
    def kinds(kernels):
        return {(template_of(kernel.spec), kernel.rule.ctas_per_row, kernel.rule.clusters) for kernel in kernels}

    assert kinds(first()) == kinds(table(90))
    assert all(others(architecture) for architecture in STATIC_ARCHITECTURES)


def name_of(value: object) -> str:
    return getattr(value, "symbol", str(value))


TYPES = (BFLOAT16, FLOAT32)
# Architecture, norm, types of x and y, whether rstd is stored, and whether the number of columns is odd.
DRAWN = (
    *((90, "layer_norm", *one, False) for one in product(TYPES, (*TYPES, FLOAT8_E4M3), (False, True))),
    *(
        (architecture, norm, dtype, out, False, True)
        for architecture, norm, dtype in product(STATIC_ARCHITECTURES, ("rms_norm", "layer_norm"), TYPES)
        for out in (dtype, FLOAT8_E4M3)
    ),
)


@pytest.mark.thorough(share=0.3)
@pytest.mark.parametrize(("architecture", "norm", "dtype", "out", "rstd", "is_odd"), DRAWN, ids=name_of)
def test_rows_of_sizes_that_are_drawn_compile_within_the_limits(architecture, norm, dtype, out, rstd, is_odd, rng):
    size = 2 * dtype.bytes
    odd, whole = rng.integers(4113 // size, 400_000 // size, 4) * 2 + 1, rng.integers(129, 16384, 6) * 32 // size
    for hidden in odd if is_odd else whole:
        case = call(norm, int(hidden), dtype, out=out, rstd=rstd)
        assert_as_described(kernels_of(case.request, ARCHITECTURES[architecture]))


def is_followed(kernel: Kernel) -> bool:
    """Whether a kernel lets the next one begin: only backward, where its own second launch is told to spread."""
    spec = kernel.spec
    return isinstance(spec, BackwardSpec) and (spec.dweight or spec.dbias) and not spec.per_head


@functools.cache
def waiting(architecture: int) -> tuple[list[Kernel], list[Kernel]]:
    """Return kernels whose launches may begin early: one of each template and way to go on, and others."""
    limits = ARCHITECTURES[architecture]
    requests = [case.request for case in CASES if case.hidden in (128, 4096, 16411, 65536)]
    requests += softmax_requests()[:: len(BUCKETS)]
    found = [kernel for request in requests for kernel in kernels_of(request, limits)]
    found += [Kernel(*general, limits) for general in general_kernels().values()]
    first = {(template_of(kernel.spec), is_followed(kernel)): kernel for kernel in reversed(found)}
    return list(first.values()), list({kernel.spec.symbol: kernel for kernel in found}.values())


@pytest.mark.parametrize(
    ("architecture", "group"),
    [
        *((80, None), (90, None)),
        *(pytest.param(*one, marks=pytest.mark.thorough(share=0.2)) for one in product((80, 90, 100), range(16))),
    ],
)
def test_a_kernel_waits_for_the_launch_before_it_before_any_access(architecture, group):
    # Its launch may begin early, but for architectures whose text does not wait.
    first, every = waiting(architecture)
    chosen = first if group is None else every[group::16]
    assert chosen
    for kernel in chosen:
        assert kernel.rule.early
        text = ptx_of(kernel.spec, architecture)
        wait, lets = (text.find(f"griddepcontrol.{what};") for what in ("wait", "launch_dependents"))
        if architecture < 90:
            assert wait == lets == -1, kernel.name
        else:
            access = re.search(r"\b(ld|st|red|atom|cp)\.[\w.:]*global", text)
            assert 0 < wait < access.start() and (lets > wait) == is_followed(kernel), kernel.name
