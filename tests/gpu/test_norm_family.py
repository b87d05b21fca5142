"""The whole family of norms on a GPU: what test_numerics.py does for rms_norm in depth, for every operator."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import calls
import numpy as np
import on_device
import pytest
import reference
from cases import BACKWARD, CASES, DELAYED, FLOAT8, FLOATS, FORWARD, Case
from frameworks import FRAMEWORKS, Guarded, Torch, bits, capture

import transformer_rtc
from transformer_rtc import Field, dispatch
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, INT8, DType

BOTH = pytest.mark.parametrize("implementation", ["rtc", "static"], indirect=True)
# What a row gives whatever the other rows are.
OF_ROWS = ("out", "residual_out", "mean", "rstd", "row_scale")


def by_name(case: Case) -> str:
    return case.name


def plain(operator: str, rows: int, hidden: int, dtype: DType, other: DType | None = None, **options: Any) -> Case:
    """Return a case of an operator with all that it takes but scales, of one type or of two."""
    other, back = other or dtype, operator in BACKWARD
    case = Case(
        rows, hidden, dtype, dtype, other, not back, operator, bias=None if back else dtype, dy=other if back else None,
        residual=other if "add" in operator else None, mean=not back and "layer_norm" in operator,
        dweight=other if back else None, dbias=other if back else None,
    )  # fmt: skip
    return case._replace(**options)


def _strides(case: Case, padding: int) -> tuple[int, ...]:
    row = case.hidden + padding
    return (row, 1) if case.heads == 0 else (case.heads * row + 2 * padding, row, 1)


def run(
    gpu: Torch,
    case: Case,
    given: dict[str, np.ndarray],
    of_rows: int = 0,
    of_columns: int = 0,
    of_outputs: int = 0,
    padding: int = 0,
    in_place: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Run a case on tensors that lie as told, in elements, with NaN around each and in what is written.

    `in_place` says which input an output replaces.
    """
    in_place = in_place or {}
    strides = _strides(case, padding)
    there: dict[str, Guarded] = {}
    for number, (name, dtype) in enumerate(calls.input_types(case).items()):
        if given[name].shape == case.shape:
            there[name] = Guarded(case.shape, dtype, of_rows and of_rows + number, strides)
        else:
            there[name] = Guarded(given[name].shape, dtype, of_columns and of_columns + number)
        there[name].fill(gpu.array(given[name]))
    made: dict[str, Guarded] = {}
    for name, dtype in calls.result_types(case).items():
        if name in in_place:
            made[name] = there[in_place[name]]
        elif name in ("out", "residual_out"):
            made[name] = Guarded(case.shape, dtype, of_outputs and of_outputs + len(made), strides)
        elif name in ("amax", "scale_inv"):
            made[name] = Guarded((1,), dtype, of_outputs).fill(gpu.module.full((1,), calls.BEFORE))
    results = calls.call(
        case,
        {name: place.array for name, place in there.items()},
        {name: place.array for name, place in made.items()},
        **options,
    )
    for name, place in made.items():
        assert results[name] is place.array, name
    found = {name: gpu.host(array) for name, array in results.items()}
    for name, place in there.items():
        if name not in in_place.values():
            np.testing.assert_array_equal(bits(gpu.host(place.array)), bits(given[name]), err_msg=f"{name} was changed")
    for place in {id(place): place for place in (*there.values(), *made.values())}.values():
        place.assert_intact_around()
    return found


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(bits(array), bits(expected[name]), err_msg=f"{name} {what}")


def on_gpu(gpu: Torch, given: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: gpu.array(array) for name, array in given.items()}


# ---- The table of cases ----------------------------------------------------------------------------------------------

NUMBERS = {case.name: number for number, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def seed(request) -> int:
    given = request.config.getoption("--seed")
    return random.SystemRandom().randrange(2**32) if given is None else given


@functools.lru_cache(maxsize=1)
def known(name: str, seed: int) -> tuple[dict[str, np.ndarray], dict[str, reference.Expected]]:
    """Return a case's inputs and what they must give: once for all implementations, which come one after the other."""
    case = CASES[NUMBERS[name]]
    given = calls.make_inputs(np.random.default_rng([seed, NUMBERS[name]]), case)
    return given, calls.expect(case, given)


@BOTH
@pytest.mark.parametrize("name", NUMBERS)
def test_every_case_is_within_the_bound_of_float64(name, implementation, gpu, seed):
    print(f"random data of --seed {seed}")
    case = CASES[NUMBERS[name]]
    given, expected = known(name, seed)
    found = run(gpu, case, given)
    calls.hold_within(case, found, expected)
    # Outputs of the framework's allocator, in memory that held NaN a moment ago.
    poison = [Guarded(calls.shape_of(case, output), dtype) for output, dtype in calls.result_types(case).items()]
    del poison
    values = {output: gpu.array(value) for output, value in calls.made_values(case).items()}
    made = calls.call(case, on_gpu(gpu, given), values)
    for output, dtype in calls.result_types(case).items():
        assert made[output].dtype == gpu.dtype(dtype) and made[output].is_contiguous()
    assert_same_bits({output: gpu.host(array) for output, array in made.items()}, found, "in new memory")


# ---- More rows than are resident -------------------------------------------------------------------------------------

LONG = (128, 1024, 4096, 4097, 8192, 16384, 65536, 131072, 262144, 524288)
_MOST_BYTES = 128 << 20  # of one array


def _many(operator: str, hidden: int, dtype: DType) -> Case:
    rows = min(50_021, _MOST_BYTES // (hidden * dtype.bytes)) | 1
    case = plain(operator, rows, hidden, dtype)
    if not case.backward:
        return case
    # Sums in float32: rounded to fewer bits, a row more or less would not show.
    given = dtype is FLOAT32
    return case._replace(rstd=given, residual=None if given else dtype, dweight=FLOAT32, dbias=FLOAT32)


MANY = [
    _many(operator, hidden, dtype)
    for operator, hidden, dtype in itertools.product((*FORWARD, *BACKWARD), LONG, (BFLOAT16, FLOAT32))
]
MANY_GENERAL = [
    _many(operator, hidden, dtype)
    for operator, hidden, dtype in itertools.product((*FORWARD, *BACKWARD), (128, 4096, 65536), (BFLOAT16, FLOAT32))
]


def longest_chain(gpu: Torch, case: Case, rule: dispatch.LaunchRule) -> int:
    """Return the most additions of a sum over rows, for any number of groups that can be resident."""
    properties = gpu.module.cuda.get_device_properties(0)
    threads = properties.max_threads_per_multi_processor
    groups = -(-case.rows // rule.rows_per_cta)
    most = properties.multi_processor_count * max(1, threads // rule.threads) // rule.ctas_per_row
    least = properties.multi_processor_count // (2 * rule.ctas_per_row)  # not every cluster finds a place
    return max(reference.additions(case.rows, min(groups, max(1, count))) for count in (least, most))


@pytest.mark.parametrize(
    ("implementation", "case"),
    [*(("rtc", case) for case in MANY), *(("static", case) for case in MANY_GENERAL)],
    indirect=["implementation"],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_more_rows_than_are_resident(case, implementation, gpu, rng):
    torch = gpu.module
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator)

    def rows(dtype: DType, centred: bool = False) -> Any:
        # Of different magnitudes, and means of both signs.
        magnitude = 2.0 ** (torch.rand((case.rows, 1), device="cuda", generator=generator) * 18 - 12)
        made = normal(case.rows, case.hidden)
        if centred:
            made += (torch.rand((case.rows, 1), device="cuda", generator=generator) - 0.5) * 16
        return (made * magnitude).to(gpu.dtype(dtype))

    given = {}
    for name, dtype in calls.input_types(case).items():
        shape = calls.shape_of(case, name)
        if name not in calls.STATISTICS:
            given[name] = normal(*shape).to(gpu.dtype(dtype)) if len(shape) == 1 else rows(dtype, case.centred)
    if case.backward and case.rstd:
        step = max(1, (1 << 24) // case.hidden)
        parts = [on_device.statistics(part, calls.EPS, case.centred) for part in given["x"].split(step)]
        for number, name in enumerate(calls.STATISTICS):
            if name in calls.input_types(case):
                given[name] = torch.cat([part[number] for part in parts])
    before = {name: array.clone() for name, array in given.items()}
    results = calls.call(case, given)
    _, rule = case.general() if implementation == "static" else case.specialise(transformer_rtc.device_limits(0))
    for name, array in before.items():
        assert torch.equal(gpu.integers(array), gpu.integers(given[name])), f"{name} was changed"
    del before
    on_device.hold(case, given, results, calls.EPS, longest_chain(gpu, case, rule))


# ---- The same bits in every run, and beside other rows ---------------------------------------------------------------

REPEATED = [
    plain(operator, (1 << 25) // hidden + 1, hidden, BFLOAT16) for operator in BACKWARD for hidden in (4096, 65536)
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


ALONE = [
    plain(operator, 1, hidden, dtype, rstd=operator not in BACKWARD)
    for operator in ("rms_norm", "layer_norm", "add_layer_norm", *BACKWARD)
    for hidden in (64, 1024, 4097, 65536)
    for dtype in (BFLOAT16, FLOAT32)
]


@BOTH
@pytest.mark.parametrize("case", ALONE, ids=by_name)
def test_a_rows_bits_are_the_same_alone_and_among_many(case, implementation, gpu, rng):
    torch = gpu.module
    probe = on_gpu(gpu, calls.make_inputs(rng, case))
    alone = {name: gpu.host(array) for name, array in calls.call(case, probe).items() if name in OF_ROWS}
    for rows in (1, 7, 129, 4099):
        places = sorted({0, 1 % rows, rows // 2, rows - 1, int(rng.integers(rows))})
        given = dict(probe)
        for name, array in probe.items():
            if tuple(array.shape) == case.shape:
                given[name] = torch.empty((rows, case.hidden), dtype=array.dtype, device="cuda").normal_()
                given[name][places] = array
        found = calls.call(case._replace(rows=rows), given)
        for name, expected in alone.items():
            for place in places:
                np.testing.assert_array_equal(
                    bits(gpu.host(found[name][place : place + 1])), bits(expected), err_msg=f"{name} {place} of {rows}"
                )
        del given, found


# ---- Heads inside a packed qkv ---------------------------------------------------------------------------------------

HEADS = [
    plain(operator, 517 * heads, hidden, FLOATS[number % 3], rstd=True, heads=heads)
    for number, (hidden, heads) in enumerate(itertools.product((64, 80, 96, 128, 256), (1, 3, 8, 32)))
    for operator in ("rms_norm", "layer_norm", *BACKWARD)
]


@BOTH
@pytest.mark.parametrize("case", HEADS, ids=by_name)
def test_heads_inside_a_packed_qkv_with_weights_of_their_own(case, implementation, gpu, rng):
    tokens, heads, hidden = case.shape
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    dense = run(gpu, case, given)
    calls.hold_within(case, dense, expected)
    if case.backward:
        assert dense["dweight"].shape == dense["dbias"].shape == (heads, hidden)
    # q, k and v beside each other, in x and in its gradient; k is what is normalized.
    packed = {name: Guarded((tokens, 3 * heads, hidden), case.x) for name in ("x", "dy") if name in given}
    k_of = slice(heads, 2 * heads)
    arrays = on_gpu(gpu, given)
    for name, place in packed.items():
        arrays[name] = place.array[:, k_of].copy_(arrays[name])
    apart = calls.call(case, arrays)
    assert apart["out"].is_contiguous()
    assert_same_bits({name: gpu.host(array) for name, array in apart.items()}, dense, "of heads apart from each other")
    for name in packed:  # each is what may be overwritten
        arrays[name].copy_(gpu.array(given[name]))
        within = calls.call(case, arrays, {"out": arrays[name]})
        assert within["out"] is arrays[name]
        assert_same_bits({key: gpu.host(array) for key, array in within.items()}, dense, f"in the place of {name}")
        arrays[name].copy_(gpu.array(given[name]))
    for place in packed.values():
        q_and_v = gpu.module.cat([place.array[:, :heads], place.array[:, 2 * heads :]])
        assert (gpu.integers(q_and_v) == -1).all(), "q or v was written"
        place.assert_intact_around()


# ---- Where rows lie --------------------------------------------------------------------------------------------------


def _anywhere() -> list[Case]:
    found = []
    operators = ("add_rms_norm", "add_layer_norm", "layer_norm_add", *BACKWARD)
    for number, (hidden, operator) in enumerate(
        itertools.product((1, 3, 7, 64, 129, 1000, 4097, 16384, 65536), operators)
    ):
        found.append(plain(operator, 5, hidden, FLOATS[number % 3], FLOATS[number // 2 % 3], weight_offset=0.5))
    return found


ANYWHERE = _anywhere()


@BOTH
@pytest.mark.parametrize("case", ANYWHERE, ids=by_name)
def test_every_alignment_gives_the_same_bits_and_writes_nothing_else(case, implementation, gpu, rng):
    given = calls.make_inputs(rng, case)
    aligned = run(gpu, case, given)
    calls.hold_within(case, aligned, calls.expect(case, given))
    for offset in range(9):
        # Of rows, columns and outputs, and how far rows are apart.
        for layout in ((offset, offset, offset, 1), (offset, 0, 8 - offset, 3), (0, 0, offset, 16), (0, offset, 0, 0)):
            assert_same_bits(run(gpu, case, given, *layout), aligned, f"at {layout}")


IN_PLACE = {
    "layer_norm": [{"out": "x"}],
    "add_rms_norm": [{"out": "x", "residual_out": "residual"}, {"out": "residual", "residual_out": "x"}],
    "add_layer_norm": [
        {"out": "x", "residual_out": "residual"}, {"out": "residual", "residual_out": "x"}, {"out": "residual"},
        {"residual_out": "residual"}, {"residual_out": "x"},
    ],
    "layer_norm_add": [{"out": "x"}, {"out": "residual"}],
    "rms_norm_backward": [{"out": "x"}, {"out": "dy"}, {"out": "dresidual"}],
    "layer_norm_backward": [{"out": "x"}, {"out": "dy"}, {"out": "dresidual"}],
}  # fmt: skip
OVERWRITTEN = [
    plain(
        operator, 11, hidden, FLOATS[number % 3], **({"residual": FLOATS[number % 3]} if operator in BACKWARD else {})
    )
    for number, hidden in enumerate((1, 128, 1000, 4096, 4097, 16385, 65536, 262144))
    for operator in IN_PLACE
]


@BOTH
@pytest.mark.parametrize("case", OVERWRITTEN, ids=by_name)
def test_in_place_gives_the_same_bits(case, implementation, gpu, rng):
    given = calls.make_inputs(rng, case)
    expected = run(gpu, case, given)
    calls.hold_within(case, expected, calls.expect(case, given))
    for in_place in IN_PLACE[case.operator]:
        assert_same_bits(run(gpu, case, given, in_place=in_place), expected, f"in place {in_place}")
        assert_same_bits(run(gpu, case, given, 1, 0, 3, 1, in_place), expected, f"in place, misaligned {in_place}")


# ---- Outputs of 8 bits -----------------------------------------------------------------------------------------------


def _values(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    """Return 4096 floats: every number of a type, those halfway between two, those around, and any others."""
    if dtype is INT8:
        numbers = np.arange(-127, 128, dtype=np.float32)
    else:
        numbers = np.arange(256, dtype=np.uint8).view(reference.NUMPY_TYPES[dtype]).astype(np.float32)
        numbers = np.sort(numbers[np.isfinite(numbers)])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(halfway, np.float32(way * np.inf)) for way in (-1, 1)]
    largest = reference.LARGEST[dtype]
    ends = np.float32([largest * 1.03, largest * 1.04, largest * 2, -largest * 1.5, 1e30, -1e30, 1e-30])
    known = np.concatenate([numbers, halfway, *near, ends]).astype(np.float32)
    others = np.exp2(rng.uniform(-18, np.log2(largest) + 1, 4096 - known.size)) * rng.choice([-1, 1], 4096 - known.size)
    return np.concatenate([known, others.astype(np.float32)]) + np.float32(0)  # as -0 and the offset are


def converted(torch: Any, y: Any, dtype: DType) -> Any:
    """Return what torch makes of y, saturated."""
    largest = reference.LARGEST[dtype]
    if dtype is INT8:
        return y.round().clamp(-128, 127).nan_to_num(0).to(torch.int8)
    return y.clamp(-largest, largest).to(getattr(torch, dtype.name))


def numbers_of(gpu: Torch, array: Any) -> np.ndarray:
    """Return elements as bits; zeros have no sign, for the general kernels add a bias of zero where there is none."""
    host = gpu.host(array)
    found = host.view(np.uint8).copy()
    found[host == 0] = 0
    return found


@pytest.fixture
def signs(gpu: Torch) -> Any:
    """Return rows whose norm, without eps, is they themselves: y is the weight, to the bit."""
    x = np.ones((3, 4096), np.float32)
    x[:, ::2] = -1
    x[1] *= -1
    return gpu.array(x)


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm", "add_rms_norm"])
def test_float8_is_converted_as_torch_does(operator, dtype, implementation, gpu, rng, signs):
    torch = gpu.module
    kind = getattr(torch, dtype.name)
    weight = gpu.array(_values(rng, dtype))
    function = getattr(transformer_rtc, operator)

    def call(weight: Any, **options: Any) -> Any:
        # Half of it twice is the sum.
        arrays = (signs / 2, signs / 2) if operator.startswith("add") else (signs,)
        found = function(*arrays, weight, eps=0.0, out_dtype=kind, **options)
        return found[0] if isinstance(found, tuple) else found

    for scale in (1.0, 0.37, 13.0):
        y = signs * weight
        options = {"scale": torch.full((1,), scale, device="cuda"), "amax": torch.full((1,), 0.25, device="cuda")}
        options["scale_inv"] = torch.full((1,), float("nan"), device="cuda")
        out = call(weight, **options)
        assert out.dtype == kind
        expected = converted(torch, y * options["scale"], dtype)
        np.testing.assert_array_equal(numbers_of(gpu, out), numbers_of(gpu, expected), err_msg=f"{scale}")
        assert options["amax"].item() == weight.abs().max().item()
        assert options["scale_inv"].item() == (1 / options["scale"]).item()
        # The maximum of all calls: a smaller one leaves it, a larger one replaces it.
        largest = options["amax"].item()
        call(weight / 4, **options)
        assert options["amax"].item() == largest
        call(weight * 2, **options)
        assert options["amax"].item() == 2 * largest
    expected = converted(torch, signs * weight, dtype)
    np.testing.assert_array_equal(numbers_of(gpu, call(weight)), numbers_of(gpu, expected))
    # What is no number stays none, and so it is told.
    bad = weight.clone()
    bad[[0, 77, 4095]] = float("nan")
    bad[[1, 78, 4094]] = float("inf")
    amax = torch.zeros(1, device="cuda")
    found, expected = call(bad, amax=amax).float(), converted(torch, signs * bad, dtype).float()
    assert torch.isnan(amax).all()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))


def test_amax_of_many_rows_and_ctas_is_the_largest_magnitude(implementation, gpu):
    torch = gpu.module
    for rows, hidden in ((20_000, 64), (3000, 4096), (300, 65536)):
        x = torch.randn(rows, hidden, device="cuda").bfloat16()
        amax = torch.zeros((), device="cuda")
        y = transformer_rtc.layer_norm(x, out_dtype=torch.float32)
        transformer_rtc.layer_norm(x, out_dtype=torch.float8_e4m3fn, amax=amax)
        torch.testing.assert_close(amax, y.abs().max(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", (*FLOAT8, INT8), ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("operator", ["rms_norm", "layer_norm"])
def test_rows_with_scales_of_their_own(operator, dtype, implementation, gpu, rng, signs):
    torch = gpu.module
    kind, largest = getattr(torch, dtype.name), reference.LARGEST[dtype]
    function = getattr(transformer_rtc, operator)
    weight = gpu.array(_values(rng, dtype).clip(-1e4, 1e4))
    for factor in (1.0, 0.013):
        out, row_scale = function(signs, weight * factor, eps=0.0, out_dtype=kind, row_scaling=True)
        y = signs * (weight * factor)
        amax = y.abs().amax(dim=-1)
        assert out.dtype == kind and torch.equal(row_scale, amax / torch.full_like(amax, largest))
        expected = converted(torch, y * (torch.full_like(amax, largest) / amax)[:, None], dtype)
        np.testing.assert_array_equal(numbers_of(gpu, out), numbers_of(gpu, expected))
    # Rows of zeros, and rows that hold what is no number, are of no account for the others.
    for hidden in (7, 64, 4096, 65536):
        x = reference.random_rows(rng, (7, hidden), FLOAT16)
        x[1], x[3, hidden // 2], x[5] = 0, np.nan, -0.0
        found = function(gpu.array(x), out_dtype=kind, row_scaling=True, eps=1e-6)
        host, scales = (gpu.host(array) for array in found)
        y = reference.forward(operator == "layer_norm", x, out=dtype)["out"]
        expected, expected_scales = reference.row_scaled(y, dtype)
        reference.assert_within(host, expected, dtype, "out")
        reference.assert_within(scales, expected_scales, FLOAT32, "row_scale")
        assert scales[1] == scales[5] == 1 and not host[[1, 5]].astype(np.float32).any()
        assert np.isnan(scales[3])


# ---- Graphs and streams ----------------------------------------------------------------------------------------------

CAPTURED = [
    plain(operator, 300, hidden, BFLOAT16, rstd=True)
    for operator in ("layer_norm", "add_rms_norm", *BACKWARD)
    for hidden in (64, 4096, 65536)
]


@BOTH
@pytest.mark.parametrize("case", CAPTURED, ids=by_name)
def test_a_captured_graph_replays_with_new_inputs(case, implementation, gpu, rng):
    torch = gpu.module
    arrays = on_gpu(gpu, calls.make_inputs(rng, case))
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
        found = {name: gpu.host(array) for name, array in captured.items()}
        expected = {name: gpu.host(array) for name, array in calls.call(case, arrays).items()}
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
    torch = gpu.module
    arrays = on_gpu(gpu, calls.make_inputs(rng, case))
    expected = {name: gpu.host(array) for name, array in calls.call(case, arrays).items()}
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
    assert_same_bits({name: gpu.host(array) for name, array in found.items()}, expected, "on another stream")


# ---- Multiprocessors that are left free ------------------------------------------------------------------------------

MARGIN = [
    plain(operator, rows, hidden, BFLOAT16, rstd=True)
    for operator in ("layer_norm", "add_rms_norm", *BACKWARD)
    for rows, hidden in ((1201, 64), (1201, 4096), (301, 65536))
]


@BOTH
@pytest.mark.parametrize("case", MARGIN, ids=by_name)
def test_a_margin_gives_the_same_bits(case, implementation, gpu, rng):
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    without = run(gpu, case, given)
    calls.hold_within(case, without, expected)
    count = gpu.module.cuda.get_device_properties(0).multi_processor_count
    for margin in (1, 16, count - 1):
        found = run(gpu, case._replace(margin=margin), given)
        # Sums over rows are of other groups.
        calls.hold_within(case, found, expected, f" with a margin of {margin}")
        same = [name for name in found if name in OF_ROWS]
        assert same
        assert_same_bits({name: found[name] for name in same}, {name: without[name] for name in same}, f"with {margin}")


@pytest.mark.parametrize("operator", (*FORWARD, *BACKWARD))
def test_a_margin_of_the_whole_device_is_refused(operator, implementation, gpu, rng):
    count = gpu.module.cuda.get_device_properties(0).multi_processor_count
    case = plain(operator, 3, 64, BFLOAT16, rstd=True)
    arrays = on_gpu(gpu, calls.make_inputs(rng, case))
    for margin in (count, count + 1, 1 << 70):
        with pytest.raises(ArgumentError, match=f"sm_margin must leave at least one of {count} multiprocessors"):
            calls.call(case._replace(margin=margin), arrays)
    with pytest.raises(ArgumentError, match="sm_margin must be a non-negative integer; it is -1"):
        calls.call(case._replace(margin=-1), arrays)


# ---- Frameworks ------------------------------------------------------------------------------------------------------

FRAMED = [
    plain("add_layer_norm", 37, 4096, FLOAT16, BFLOAT16),
    plain("layer_norm_backward", 37, 4096, BFLOAT16, FLOAT32, rstd=True, residual=BFLOAT16),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", FRAMED, ids=by_name)
def test_every_framework_gives_its_own_arrays(framework, case, implementation, rng):
    kind = FRAMEWORKS[framework]()
    given = calls.make_inputs(rng, case)
    expected = calls.expect(case, given)
    arrays = {name: kind.array(array) for name, array in given.items()}
    found = {name: kind.host(array) for name, array in calls.call(case, arrays).items()}
    calls.hold_within(case, found, expected)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits(kind.host(array)), bits(given[name]), err_msg=name)
    assert_same_bits(calls.call(case, given), found, "staged")


def test_host_arrays_are_written_where_the_caller_says(implementation, rng):
    # All that is written goes back: two arrays of rows, and single values.
    case = plain("add_rms_norm", 37, 1000, FLOAT32, out=FLOAT8[0], scaling=DELAYED)
    given = calls.make_inputs(rng, case)
    outputs = calls.made_values(case)
    for name in ("out", "residual_out"):
        outputs[name] = np.zeros(case.shape, reference.NUMPY_TYPES[case.types[name]])
    found = calls.call(case, given, outputs)
    for name, array in outputs.items():
        assert found[name] is array
    calls.hold_within(case, found, calls.expect(case, given))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_rows_give_empty_outputs_and_sums_of_zero(framework, implementation):
    kind = FRAMEWORKS[framework]()
    for leading in ((0,), (3, 0, 2)):
        x, weight = kind.array(np.zeros((*leading, 300), np.float16)), kind.array(np.ones(300, np.float16))
        y, mean, rstd = transformer_rtc.layer_norm(x, weight, return_mean=True, return_rstd=True)
        shapes = [tuple(array.shape) for array in (y, mean, rstd)]
        assert shapes == [(*leading, 300), leading, leading]
        dx, dweight, dbias = transformer_rtc.layer_norm_backward(x, x, weight)
        assert tuple(dx.shape) == (*leading, 300)
        for gradient in (dweight, dbias):
            np.testing.assert_array_equal(bits(kind.host(gradient)), np.zeros(300, np.int16))


COMPILED = (
    *CASES,
    *MANY,
    *REPEATED,
    *ALONE,
    *HEADS,
    *ANYWHERE,
    *OVERWRITTEN,
    *CAPTURED,
    *MARGIN,
    *(case._replace(margin=1) for case in MARGIN),
    *FRAMED,
)
