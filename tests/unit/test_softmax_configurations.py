# SPDX-License-Identifier: Apache-2.0
"""How rows of softmax are divided: every length, type and device has a launch that it can do and that holds the row."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator

import pytest

from transformer_rtc import _native
from transformer_rtc.declaration import MOST_COLUMNS, declaration_of
from transformer_rtc.ops.softmax.config import BUCKETS
from transformer_rtc.request import LaunchRule, Request
from transformer_rtc.spec import (
    ARCHITECTURES,
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    STATIC_ARCHITECTURES,
    DeviceLimits,
    DType,
    KernelSpec,
)

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
LONGEST = 4 << 20
MOST_KERNELS = 14
OF_EACH = [size for size in BUCKETS if size <= LONGEST]
# Beside whole devices those, or parts, with smaller clusters or none, or that hold fewer CTAs of a row.
DEVICES = [
    *STATIC_ARCHITECTURES.values(),
    *(ARCHITECTURES[90]._replace(max_cluster_size=size) for size in (8, 4, 1)),
    ARCHITECTURES[120]._replace(max_cluster_size=1),
    *(ARCHITECTURES[architecture]._replace(max_ctas_per_row=size) for architecture in (80, 90) for size in (8, 2, 1)),
]
OPERATORS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


def test_the_last_bucket_has_the_longest_rows_that_the_native_module_takes():
    assert BUCKETS[-1] == MOST_COLUMNS == _native.MOST_COLUMNS


def request(operator: str, columns: int, x: DType, out: DType, mask: DType | None, causal: bool, more: bool) -> Request:
    """Return what a call asks for, with a sink where there is more, and its gradients."""
    wanted = FLOAT32 if more else None
    if "backward" in operator:
        mask = mask if mask in FLOATS else None
        dtypes = {"dy": out, "y": x, "out": x, "mask": mask, "dmask": mask, "dsink": wanted}
    else:
        dtypes = {"x": x, "out": out, "mask": mask}
    flags = frozenset(["causal"] if causal else [])
    return Request(operator, {**dtypes, "sink": wanted, "lse": wanted}, columns, False, False, flags)


def chosen(operator: str, columns: int, limits: DeviceLimits, *options: object) -> tuple[KernelSpec, LaunchRule]:
    asked = request(operator, columns, *options)
    stages = declaration_of(operator).family.specialise(asked, limits)
    assert len(stages) == 1 + sum(asked.dtypes.get(name) is not None for name in ("dsink", "dmask"))
    return stages[0]


def every_option(operator: str) -> Iterator[tuple[object, ...]]:
    masks = (None, FLOAT32) if "backward" in operator else (None, BOOL, FLOAT32, BFLOAT16)
    return itertools.product(FLOATS, FLOATS, masks, (False, True), (False, True))


@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: "_".join(map(str, (limits[0], *limits[2:]))))
@pytest.mark.parametrize("operator", OPERATORS[::2])
def test_every_length_is_divided_as_the_device_can_launch_it(operator, limits):
    for options in every_option(operator):
        x, out, mask, causal, more = options
        if more:  # which does not change how a row is divided
            continue
        read = [x, out] if "backward" in operator else [x, *([mask] if mask else [])]
        for columns in OF_EACH:
            spec, rule = chosen(operator, columns, limits, *options)
            config = spec.config
            what = f"{columns} columns, {options}: {spec.symbol}"
            # The launch. Staged rows have a kernel for any number of threads up to its own.
            assert rule.threads % 32 == 0 and 32 <= rule.threads <= config.threads <= 1024, what
            assert rule.threads == config.threads or config.staged, what
            # What the threads of a CTA exchange is in shared memory, too.
            assert rule.dynamic_shared_memory <= limits.shared_memory_per_cta - 4096, what
            assert rule.rows_per_cta == config.rows_per_cta and rule.ctas_per_row == config.ctas_per_row, what
            assert rule.ctas_per_row in (1, 2, 4, 8, 16) and rule.ctas_per_row <= limits.max_ctas_per_row, what
            assert not rule.clusters or rule.ctas_per_row <= limits.max_cluster_size, what
            assert rule.clusters == (rule.ctas_per_row > 1 and limits.max_cluster_size > 1), what
            assert rule.cooperative == (rule.workspace_bytes > 0), what
            # The row: in registers, in shared memory, or in what is read more than once.
            assert config.vec_size == 16 // max(x.bytes, out.bytes), what
            assert [config.chunked, config.staged].count(True) <= 1, what
            mine = -(-columns // (config.ctas_per_row * config.vec_size)) * config.vec_size  # the most that a CTA has
            if config.staged:
                assert rule.dynamic_shared_memory >= sum(mine * dtype.bytes for dtype in read), what
            elif not config.chunked:
                assert config.threads_per_row * config.vectors_per_thread * config.vec_size >= mine, what
            # Where all columns take part, rows may come before their turn: as many CTAs as are resident take them.
            assert rule.persistent == (config.persistent or config.tiled), what
            assert not rule.persistent or not (causal or (mask and "backward" not in operator)), what
            assert (config.staged or rule.persistent) == (rule.dynamic_shared_memory > 0), what


@pytest.mark.parametrize("architecture", STATIC_ARCHITECTURES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_symbol_names_one_kernel(operator, architecture):
    named: dict[str, object] = {}
    for options, columns in itertools.product(every_option(operator), OF_EACH):
        spec, _ = chosen(operator, columns, ARCHITECTURES[architecture], *options)
        plain, _ = chosen(operator.removeprefix("log_"), columns, ARCHITECTURES[architecture], *options[:-1], False)
        assert spec.config == plain.config
        assert named.setdefault(spec.symbol, spec) == spec
    programs = {spec.program for spec in named.values()}
    assert len(programs) == len(named)


@pytest.mark.parametrize("operator", OPERATORS)
def test_few_kernels_serve_every_length(operator):
    options = itertools.product(
        (FLOAT32, BFLOAT16), STATIC_ARCHITECTURES.values(), (None, BOOL, FLOAT32), (False, True)
    )
    for dtype, limits, mask, causal in options:
        fewest: dict[str, int] = {}  # the fewest columns of each kernel
        for columns in BUCKETS:
            spec, _ = chosen(operator, columns, limits, dtype, dtype, mask, causal, False)
            fewest.setdefault(spec.symbol, columns)
        assert len(fewest) <= MOST_KERNELS


def test_a_length_is_launched_as_the_shortest_bucket_that_holds_it(rng):
    assert list(BUCKETS) == sorted(set(BUCKETS))
    for columns in rng.integers(1, LONGEST, 1000, endpoint=True):
        bucket = BUCKETS[bisect.bisect_left(BUCKETS, columns)]
        assert columns <= bucket <= max(32, 2 * columns) and (columns <= 512 or bucket <= columns * 5 / 4 + 1)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_shorter_row_has_no_more_ctas_where_there_are_no_clusters(operator):
    for limits, dtype, causal in itertools.product(STATIC_ARCHITECTURES.values(), FLOATS, (False, True)):
        without = limits._replace(max_cluster_size=1)
        ctas = [
            chosen(operator, columns, without, dtype, dtype, None, causal, False)[1].ctas_per_row for columns in BUCKETS
        ]
        assert ctas == sorted(ctas)


@pytest.mark.parametrize("operator", OPERATORS[2:])
@pytest.mark.parametrize("causal", [False, True])
def test_one_kernel_makes_a_gradient_of_every_length(operator, causal):
    family = declaration_of(operator).family
    requests = [request(operator, columns, BFLOAT16, BFLOAT16, FLOAT16, causal, True) for columns in BUCKETS]
    for limits in STATIC_ARCHITECTURES.values():
        stages = [family.specialise(asked, limits) for asked in requests]
        assert all(first.row_bytes == 4 and first.columns_per_cta == 0 for (_, first), *_ in stages)
        assert len({(of_sink[0].symbol, of_mask[0].symbol) for _, of_sink, of_mask in stages}) == 1
        rule = stages[0][2][1]
        assert rule.clusters == (limits.max_cluster_size >= 8) and rule.ctas_per_row == (8 if rule.clusters else 1)
    general = [family.static(asked) for asked in requests]
    assert len({(of_sink[0].symbol, of_mask[0].symbol) for _, of_sink, of_mask in general}) == 1


@pytest.mark.parametrize("operator", OPERATORS[::2])
@pytest.mark.parametrize("architecture", (80, 90))
def test_every_configuration_of_softmax_fits_and_holds_the_row(architecture, operator, rng):
    drawn, limits = random.Random(int(rng.integers(2**32))), ARCHITECTURES[architecture]
    declaration = declaration_of(operator)
    for options in drawn.sample(list(every_option(operator)), 12):
        columns = drawn.choice(declaration.buckets[:50])
        asked = request(operator, columns, *options)
        first, *others = declaration.family.configurations(asked, limits)
        assert len({first, *others}) == 1 + len(others)
        for config in drawn.sample(others, min(8, len(others))):
            (spec, rule), *_ = declaration.family.specialise(asked, limits, config)
            assert spec.config == config.of_kernel
            assert rule.threads in range(32, 1025, 32) and rule.ctas_per_row <= limits.max_ctas_per_row
            assert rule.dynamic_shared_memory + 4096 <= limits.shared_memory_per_cta
            held = config.threads_per_row * config.vectors_per_thread * config.vec_size * config.ctas_per_row
            assert config.staged or held >= columns
