# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of the family of norms: rows by the million, runs beside other work, graphs and streams."""

from __future__ import annotations

from typing import Any

import calls
import numpy as np
import pytest
import reference
from cases import BACKWARD, FLOATS, NORMS, Case
from frameworks import capture, inputs
from norm_checks import a_rows_bits_are_the_same_alone_and_among_many, case_of, covering
from rigs import OF_ROWS, Rig, assert_same_bits, hold

import transformer_rtc
from transformer_rtc import Field, rms_norm
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT32, DType

BOTH = pytest.mark.parametrize("implementation", ["rtc", "static"], indirect=True)


def by_name(case: Case) -> str:
    return case.name


# ---- More rows than are resident -------------------------------------------------------------------------------------

LONG = (128, 1024, 4096, 4097, 8192, 16384, 65536, 131072, 262144, 524288)
_MOST_BYTES = 128 << 20  # of one array


def _many(hidden: int, operator: str, dtype: DType) -> Case:
    rows = min(50_021, _MOST_BYTES // (hidden * dtype.bytes)) | 1
    case = case_of(operator, rows, hidden, dtype)
    if not case.backward:
        return case
    # Sums in float32: rounded to fewer bits, a row more or less would not show.
    given = dtype is FLOAT32
    return case._replace(rstd=given, residual=None if given else dtype, dweight=FLOAT32, dbias=FLOAT32)


def _of_many(implementation: str, lengths: tuple[int, ...]) -> list[Any]:
    return [
        pytest.param(implementation, case, marks=parameter.marks, id=f"{implementation}-{case.name}")
        for parameter in covering(lengths, NORMS, (BFLOAT16, FLOAT32))
        for case in [_many(*parameter.values)]
    ]


MANY = [*_of_many("rtc", LONG), *_of_many("static", (128, 4096, 65536))]


def longest_chain(torch: Any, case: Case, implementation: str) -> int:
    """Return the most additions of a sum over rows, for any number of groups that can be resident."""
    properties = torch.cuda.get_device_properties(0)
    count, threads = properties.multi_processor_count, properties.max_threads_per_multi_processor
    _, rule = case.general() if implementation == "static" else case.specialise(transformer_rtc.device_limits(0))
    groups = -(-case.rows // rule.rows_per_cta)
    most = count * max(1, threads // rule.threads) // rule.ctas_per_row
    least = count // (2 * rule.ctas_per_row)  # not every cluster finds a place
    return max(reference.additions(case.rows, min(groups, max(1, resident))) for resident in (least, most))


@pytest.mark.parametrize(("implementation", "case"), MANY, indirect=["implementation"])
def test_more_rows_than_are_resident(case, implementation, rig, torch, rng, monkeypatch):
    # A few rows at many random places: float64 holds one of each, whose bits all others must have.
    few = case._replace(rows=min(97, max(3, (1 << 22) // case.hidden)))
    host = calls.make_inputs(rng, few)
    index = rng.permutation(np.append(np.arange(few.rows), rng.integers(few.rows, size=case.rows - few.rows)))
    places = torch.from_numpy(index).cuda()
    given = {
        name: array[places] if calls.shape_of(few, name)[0] == few.rows else array
        for name, array in rig.on_device(host).items()
    }
    before = {name: array.clone() for name, array in given.items()}
    results = rig.call(case, given)
    integers = rig.arrays.integers
    for name, array in before.items():
        assert torch.equal(integers(array), integers(given[name])), f"{name} was changed"
    first = torch.from_numpy(np.unique(index, return_index=True)[1]).cuda()
    found = {name: array[first] if name in OF_ROWS else array for name, array in results.items()}
    for name in found.keys() & set(OF_ROWS):
        assert torch.equal(integers(results[name]), integers(found[name][places])), f"{name} of equal rows differs"
    expected = calls.expect(few, host)
    if case.backward:
        chain = longest_chain(torch, case, implementation)
        monkeypatch.setattr(reference, "additions", lambda rows, groups=1: chain)
        of_all = {**host, "dy": host["dy"].astype(np.float64) * np.bincount(index)[:, None]}
        sums = calls.expect(few, of_all)
        expected |= {name: sums[name] for name in ("dweight", "dbias")}
    calls.hold_within(few, rig.on_host(found), expected)


# ---- The same bits in every run --------------------------------------------------------------------------------------

REPEATED = [
    case_of(operator, (1 << 25) // hidden + 1, hidden, BFLOAT16) for operator in BACKWARD for hidden in (4096, 65536)
]


@BOTH
@pytest.mark.parametrize("case", REPEATED, ids=by_name)
def test_a_hundred_runs_beside_other_work_have_the_same_bits(case, implementation, gpu):
    torch = gpu.module
    given = {
        name: torch.randn(calls.shape_of(case, name), device="cuda").to(gpu.dtype(dtype))
        for name, dtype in calls.input_types(case).items()
    }
    first = calls.call(case, given)
    assert set(first) == {"out", "dweight", "dbias"}
    factor, side = torch.randn(4096, 4096, device="cuda").bfloat16(), torch.cuda.Stream()
    torch.cuda.synchronize()
    changed = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.mm(factor, factor)
        found = calls.call(case, given)
        changed += torch.stack([(gpu.integers(found[name]) != gpu.integers(first[name])).sum() for name in first])
    torch.cuda.synchronize()
    assert changed.tolist() == [0] * len(first), f"elements of {', '.join(first)} that differ, in a hundred runs"


# ---- Rows beyond 32 bits, and of several CTAs ------------------------------------------------------------------------


def test_more_rows_than_a_32_bit_offset_reaches(implementation, gpu, rng):
    torch = gpu.module
    rows, hidden = (1 << 32) // 1000 + 5, 1000
    x = torch.empty((rows, hidden), dtype=torch.bfloat16, device="cuda").normal_()
    y, rstd = rms_norm(x, return_rstd=True)
    for place in (0, (1 << 31) // hidden, rows - 1):
        expected, expected_rstd = reference.rms_norm(gpu.host(x[place]))
        reference.assert_close(gpu.host(y[place]), expected, BFLOAT16)
        reference.assert_close(gpu.host(rstd[place : place + 1]), expected_rstd[None], FLOAT32, "rstd")


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (65536, 65537, 131071, 262144, 1048576, 1048577, 3_000_001))
def test_clusters_and_cooperative_grids_of_more_rows_than_are_resident(limited, hidden, dtype, gpu, rng):
    call, family = limited
    distinct, repeats = 3, 100 if hidden <= 262144 else 30
    x, weight = inputs(rng, Case(distinct, hidden, dtype, dtype, dtype, True))
    expected, expected_rstd = reference.rms_norm(x, weight)
    x_gpu, weight_gpu = gpu.array(x), gpu.array(weight)
    many = x_gpu.repeat(repeats, 1)
    out = Rig("rtc", gpu).guarded(tuple(many.shape), dtype, int(rng.integers(4)))
    y, rstd = call(many, weight_gpu, out.array, True)
    first = gpu.host(y[:distinct])
    reference.assert_close(first, expected, dtype)
    reference.assert_close(gpu.host(rstd[:distinct]), expected_rstd, FLOAT32, "rstd")
    # Every repetition has the bits of the first.
    torch = gpu.module
    integers = torch.int32 if dtype is FLOAT32 else torch.int16
    assert (y.view(integers).view(repeats, distinct, hidden) == y[:distinct].view(integers)).all()
    assert (rstd.view(torch.int32).view(repeats, distinct) == rstd[:distinct].view(torch.int32)).all()
    # In place, twice: no state outlives a launch.
    for _ in range(2):
        again = many.clone()
        call(again, weight_gpu, again)
        assert (again.view(integers) == y.view(integers)).all()
    out.assert_intact_around()
    if hidden >= 262144:  # more than a CTA's shared memory holds: the rows really were shared, and as asked
        assert family.rules[-1].ctas_per_row > 1
        assert family.rules[-1].clusters == (family.max_cluster_size > 1)


def test_the_bits_of_a_shared_row_do_not_depend_on_the_others(limited, gpu, rng):
    call, _ = limited
    rig = Rig("rtc", gpu)
    rig.call = lambda case, given: {"out": call(given["x"], given["weight"])}
    for hidden in (65536, 131071):
        a_rows_bits_are_the_same_alone_and_among_many(rig, hidden, "rms_norm", BFLOAT16, rng)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (1 << 20, (1 << 20) + 1, 5_000_011))
def test_rows_of_a_million_and_more(hidden, dtype, rig, rng):
    hold([rig], Case(2, hidden, dtype, dtype, dtype), rng, ((0, 0, 1, 1),))


def test_amax_of_many_rows_and_ctas_is_the_largest_magnitude(implementation, gpu):
    torch = gpu.module
    for rows, hidden in ((20_000, 64), (3000, 4096), (300, 65536)):
        x = torch.randn(rows, hidden, device="cuda").bfloat16()
        amax = torch.zeros((), device="cuda")
        y = transformer_rtc.layer_norm(x, out_dtype=torch.float32)
        transformer_rtc.layer_norm(x, out_dtype=torch.float8_e4m3fn, amax=amax)
        torch.testing.assert_close(amax, y.abs().max(), rtol=1e-6, atol=0)


# ---- Graphs and streams ----------------------------------------------------------------------------------------------

CAPTURED = [
    case_of(operator, 300, hidden, BFLOAT16, rstd=True)
    for operator in ("layer_norm", "add_rms_norm", *BACKWARD)
    for hidden in (64, 4096, 65536)
]


@BOTH
@pytest.mark.parametrize("case", CAPTURED, ids=by_name)
def test_a_captured_graph_replays_with_new_inputs(case, rig, gpu, rng):
    torch = gpu.module
    arrays = rig.on_device(calls.make_inputs(rng, case))
    calls.call(case, arrays)  # compiles and loads, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        captured = calls.call(case, arrays)
    for _ in range(3):
        given = calls.make_inputs(rng, case)
        for name, host in given.items():
            arrays[name].copy_(gpu.array(host))
        for array in captured.values():
            array.fill_(float("nan"))
        # Twice in a row: what a launch leaves in a workspace must not reach the next one.
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        found, expected = rig.on_host(captured), rig.on_host(calls.call(case, arrays))
        assert_same_bits(found, expected, "replayed")
        calls.hold_within(case, found, calls.expect(case, given))


@pytest.fixture
def delay(manager):
    """Return a call that keeps a stream busy for about a tenth of a second."""
    text = (
        'extern "C" __global__ void delay(Params params) {\n  const long long start = clock64();\n'
        "  while (clock64() - start < params.cycles) {}\n}"
    )
    kernel = manager.compile(text, "delay", (Field("cycles", "int64"),), 0)
    return lambda stream: kernel.launch_plain((1, 1, 1), (1, 1, 1), {"cycles": 200_000_000}, stream)


@pytest.mark.parametrize("explicit", [True, False], ids=["given", "current"])
@pytest.mark.parametrize("case", CAPTURED[1::3], ids=by_name)
def test_all_launches_of_a_call_are_on_its_stream(case, explicit, gpu, rng, delay):
    torch, rig = gpu.module, Rig("rtc", gpu)
    arrays = rig.on_device(calls.make_inputs(rng, case))
    expected = rig.on_host(calls.call(case, arrays))
    x = arrays["x"].clone()
    arrays["x"].fill_(float("nan"))  # who reads it too early sees that
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        delay(side.cuda_stream)
        arrays["x"].copy_(x)
        if not explicit:
            found = calls.call(case, arrays)
    if explicit:
        found = calls.call(case, arrays, stream=side)
    assert not side.query(), "the producer was too fast to show anything"
    side.synchronize()
    assert_same_bits(rig.on_host(found), expected, "on another stream")


@pytest.mark.parametrize("operator", NORMS)
def test_a_margin_of_the_whole_device_is_refused(operator, rig, gpu, rng):
    count = gpu.module.cuda.get_device_properties(0).multi_processor_count
    case = case_of(operator, 3, 64, BFLOAT16, rstd=True)
    arrays = rig.on_device(calls.make_inputs(rng, case))
    for margin in (count, count + 1, 1 << 70):
        with pytest.raises(ArgumentError, match=f"sm_margin must leave at least one of {count} multiprocessors"):
            calls.call(case._replace(margin=margin), arrays)
    with pytest.raises(ArgumentError, match="sm_margin must be a non-negative integer; it is -1"):
        calls.call(case._replace(margin=-1), arrays)
