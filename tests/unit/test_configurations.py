# SPDX-License-Identifier: Apache-2.0
"""How rows of any size are divided, for whatever is asked of them. No compiler is asked."""

from __future__ import annotations

import itertools
import random

import pytest
from cases import CASES, NORMS, Case, draw

from transformer_rtc.declaration import MOST_COLUMNS, declaration_of
from transformer_rtc.ops.norm.backward import FinishSpec
from transformer_rtc.ops.norm.config import RESERVED_SHARED, ForwardRow
from transformer_rtc.ops.norm.heuristics import configure
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT32, STATIC_ARCHITECTURES

TWO_TYPES = pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=lambda dtype: dtype.symbol)
TWO_NORMS = pytest.mark.parametrize("norm", ("rms_norm", "layer_norm"))


def sizes(drawn: random.Random) -> list[int]:
    """Return all small ones, those of the cases, some that just fill CTAs, and samples of others."""
    found = {*range(1, 1025), *(case.hidden for case in CASES), MOST_COLUMNS}
    found |= {2048 * steps * ctas - less for steps in range(4, 9) for ctas in (1, 2, 4, 8, 16, 32) for less in (1, 3)}
    found |= {int(2 ** drawn.uniform(10, 30)) for _ in range(400)}
    return sorted(found | {8 * int(2 ** drawn.uniform(7, 20)) for _ in range(400)})


def row_types(case: Case, spec) -> list:
    """Return the types of a kernel's arrays of rows."""
    sources = (field.source.partition(".") for field in spec.params.fields)
    return [case.types[array] for array, _, what in sources if what == "outer_stride"]


def assert_fits(rule, limits) -> None:
    assert rule.threads in range(32, 1025, 32)
    assert rule.ctas_per_row in (1, 2, 4, 8, 16) and rule.ctas_per_row <= limits.max_ctas_per_row
    # Else the launch is cooperative: its CTAs are resident, with as many as may wait for each other.
    assert rule.clusters == (rule.ctas_per_row > 1 and limits.max_cluster_size > 1)
    assert not rule.clusters or rule.ctas_per_row <= limits.max_cluster_size
    assert rule.dynamic_shared_memory + RESERVED_SHARED <= limits.shared_memory_per_cta
    assert rule.early


def assert_tiles(case: Case, spec) -> None:
    """Check that a row's CTAs hold all of it, each column once, and that no warp is left without a column."""
    config, hidden = spec.config, case.hidden
    threads, of_row = config.threads_per_row, config.ctas_per_row * config.chunk
    assert threads in (1, 2, 4, 8, 16) or threads % 32 == 0
    assert config.vec_size in (1, 2, 4, 8)
    assert config.vec_size * max(dtype.bytes for dtype in row_types(case, spec)) <= 16
    assert spec.unaligned or hidden % config.vec_size == 0
    assert (spec.chunks - 1) * of_row < hidden <= spec.chunks * of_row
    assert spec.chunks == 1 or not config.in_shared
    fewer = threads // 2 if threads <= 32 else threads - 32
    if threads > 64 or 1 < threads <= 32:
        assert of_row * fewer // threads < hidden
    if threads > 64:
        assert spec.chunks * of_row <= 2 * hidden


@pytest.mark.parametrize("architecture", STATIC_ARCHITECTURES)
def test_a_row_of_any_size_is_divided_within_the_limits_and_fills_its_threads(architecture, rng):
    drawn, symbols = random.Random(int(rng.integers(2**32))), {}
    whole, seen = ARCHITECTURES[architecture], set()
    for hidden, backward in itertools.product(sizes(drawn), (False, True)):
        case = draw(hidden, backward, drawn)
        most, clusters = drawn.choice((16, 8, 4, 2, 1)), min(whole.max_cluster_size, drawn.choice((8, 4, 2, 1, 1, 1)))
        for limits in (whole, whole._replace(max_cluster_size=clusters, max_ctas_per_row=most)):
            seen.add(case.operator)
            for spec, rule in case.stages(limits):
                try:
                    assert_fits(rule, limits)
                    if not isinstance(spec, FinishSpec):
                        assert_tiles(case, spec)
                        assert symbols.setdefault(spec.config.symbol, spec.config) == spec.config
                        reserved = spec.config.reserved_shared if spec.config.stages else 0
                        assert rule.dynamic_shared_memory + reserved <= limits.shared_memory_per_cta
                except AssertionError as error:
                    raise AssertionError(f"{case.name} for {limits}: {spec.symbol}") from error
    assert len(set(symbols.values())) == len(symbols) > 100
    assert seen == set(NORMS)


@pytest.mark.parametrize("architecture", STATIC_ARCHITECTURES)
def test_every_configuration_of_a_norm_fits_and_holds_the_row(architecture, rng):
    drawn, whole, seen = random.Random(int(rng.integers(2**32))), ARCHITECTURES[architecture], 0
    for hidden in drawn.sample(sizes(drawn), 150):
        case = draw(hidden, drawn.random() < 0.5, drawn)
        limits = whole._replace(max_ctas_per_row=drawn.choice((16, 8, 2, 1)))
        family = declaration_of(case.operator).family
        first, *others = family.configurations(case.request, limits)
        assert family.specialise(case.request, limits)[0][0].config == first
        assert len({first, *others}) == 1 + len(others)
        for config in drawn.sample(others, min(8, len(others))):
            for unaligned in (False, True):
                asked = case.request._replace(unaligned=unaligned)
                (spec, rule), *_ = family.specialise(asked, limits, config)
                assert_fits(rule, limits)
                assert_tiles(case, spec)
                assert spec.config == config
                seen += 1
    assert seen > 500


@pytest.mark.parametrize("architecture", STATIC_ARCHITECTURES)
@pytest.mark.parametrize("operator", ("add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add"))
def test_what_two_odd_rows_put_together_fits_beside_each_other(architecture, operator):
    # The longest that are left in registers: y and the sum are put together in shared memory.
    limits = ARCHITECTURES[architecture]
    for hidden in (12289, 14543, 16027, 16383):
        for heads in (0, 3):
            case = Case(3, hidden, FLOAT32, FLOAT32, FLOAT32, operator=operator, residual=FLOAT32, heads=heads)
            assert_fits(case.specialise(limits)[1], limits)


@TWO_TYPES
def test_layer_norm_of_whole_vectors_fills_its_ctas(dtype, rng):
    for vectors in rng.integers(256, 16384, 600):
        hidden = int(vectors) * 16 // dtype.bytes
        config = configure(ForwardRow("layer_norm", hidden, (dtype,), (dtype, dtype), dtype, dtype), ARCHITECTURES[90])
        assert 0.8 <= hidden / (config.ctas_per_row * config.chunk) <= 1, hidden


@TWO_TYPES
@TWO_NORMS
@pytest.mark.parametrize("architecture", STATIC_ARCHITECTURES)
def test_a_row_of_an_odd_number_of_columns_has_vectors_of_16_bytes_and_fills_its_ctas(architecture, norm, dtype):
    columns = (dtype, dtype) if norm == "layer_norm" else (dtype,)
    for hidden in range(4113 // dtype.bytes | 1, 400_000 // dtype.bytes, 254):
        config = configure(ForwardRow(norm, hidden, (dtype,), columns, dtype, dtype), ARCHITECTURES[architecture])
        assert config.vec_size * dtype.bytes == 16, hidden
        assert 0.79 <= hidden / (config.ctas_per_row * config.chunk) <= 1, hidden


def test_the_general_kernels_partial_sums_take_no_more_memory_than_rows_in_float32():
    found = [(case.hidden, case.general()[1]) for case in CASES if case.backward and not case.heads]
    assert {rule.rows_per_cta for _, rule in found} == {2}
    for hidden, rule in found:
        assert rule.partial_bytes <= 4 * rule.rows_per_cta * -(-hidden // 8) * 8, hidden
