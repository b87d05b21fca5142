"""Every kernel of this package on the CPU: checked in one order, then fast in others, against float64.

What a row gives must depend on nothing else: every test that runs one case in several ways wants the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import reference
from cases import CASES, COMBINATIONS, FAMILY, FLOATS, HIDDEN, Case

from transformer_rtc import KernelManager, LaunchConfig, SimulatedDevice, dispatch, rms_norm, using
from transformer_rtc.cache import DiskCache
from transformer_rtc.ops import norms
from transformer_rtc.ops.norms import NormConfig, NormSpec, configure
from transformer_rtc.spec import ARCHITECTURES, BFLOAT16, FLOAT16, FLOAT32, DType, Target

EVERY_ARCHITECTURE = tuple(ARCHITECTURES)
WITH_CLUSTERS = tuple(architecture for architecture, limits in ARCHITECTURES.items() if limits.max_cluster_size > 1)
WITHOUT_CLUSTERS = tuple(architecture for architecture in ARCHITECTURES if architecture not in WITH_CLUSTERS)

_BITS = {2: np.uint16, 4: np.uint32}


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """Give the operators a manager with a cache of the tests' own: images are shared by every order and every test."""
    made = KernelManager(DiskCache(str(tmp_path_factory.mktemp("kernels"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "manager", made)
        yield made


# ---- Devices, memory, calls ----------------------------------------------------------------------------------------


def devices(architecture: int, seeds: Sequence[int] = (1,), **options: Any) -> tuple[SimulatedDevice, ...]:
    """Return the gate, which checks every access, and what numbers are tried with besides."""
    return (
        SimulatedDevice(architecture, checked=True, **options),
        SimulatedDevice(architecture, order="last_in", **options),
        *(SimulatedDevice(architecture, order="random", seed=seed, **options) for seed in seeds),
    )


def compile_together(kernels: KernelManager, spec: NormSpec, architecture: int) -> None:
    """Compile both modes at once, on two cores."""
    targets = [Target(architecture, mode) for mode in ("checked", "fast")]
    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(lambda target: kernels.image(spec, target), targets))


def bits(array: np.ndarray) -> np.ndarray:
    """Return elements as integers, so that NaN and the sign of zero count."""
    return np.ascontiguousarray(array).view(_BITS[array.itemsize])


class Guarded:
    """An array of NaN, of any strides and alignment, in memory that must not change around it.

    Parameters
    ----------
    shape, strides : tuple of int
        Strides in elements, row-major by default.
    dtype : DType
        Of the elements.
    offset : int
        Elements beyond an address that is aligned to 256 bytes.
    """

    GUARD = 256  # elements on either side

    def __init__(
        self, shape: tuple[int, ...], dtype: DType, offset: int = 0, strides: tuple[int, ...] | None = None
    ) -> None:
        if strides is None:
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        ways = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        low, high = sum(min(0, way) for way in ways), sum(max(0, way) for way in ways)
        # All bits set is a NaN of every type.
        memory = np.full(high - low + 1 + offset + 2 * self.GUARD + 256 // dtype.bytes, -1, f"i{dtype.bytes}")
        to_aligned = -memory.ctypes.data % 256 // dtype.bytes
        start = memory[to_aligned + self.GUARD + offset - low :]
        self._memory = memory
        self._bits = np.lib.stride_tricks.as_strided(start, shape, [stride * dtype.bytes for stride in strides])
        self.array = self._bits.view(reference.NUMPY_TYPES[dtype])

    def fill(self, values: np.ndarray) -> Guarded:
        self._bits[...] = bits(values).view(self._bits.dtype).reshape(values.shape)
        return self

    def assert_intact_around(self) -> None:
        """Check every byte that is not the array's; what the array held is lost."""
        self._bits[...] = -1
        changed = np.flatnonzero(self._memory != -1)
        assert changed.size == 0, f"elements {changed[:8]} around the array were written, {changed.size} in all"


def inputs(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    weight = None if case.weight is None else reference.random_weight(rng, case.hidden, case.weight)
    return reference.random_rows(rng, (case.rows, case.hidden), case.x), weight


# Offsets in elements of x, the weight and the output, and elements that pad their rows to a multiple.
ALIGNED = (0, 0, 0, 16)
MISALIGNED = (1, 3, 5, 1)
Call = Callable[..., Any]


def run(
    call: Call, device: SimulatedDevice, case: Case, x: np.ndarray, weight: np.ndarray | None, layout: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Run a case on rows that lie as told, with NaN around every array."""
    of_x, of_weight, of_out, multiple = layout
    stride = -(-case.hidden // multiple) * multiple
    x_there = Guarded(x.shape, case.x, of_x, (stride, 1)).fill(x)
    weight_there = None if case.weight is None else Guarded((case.hidden,), case.weight, of_weight).fill(weight)
    out = Guarded(x.shape, case.out, of_out, (stride, 1))
    options = {"weight_offset": 0.5, "out": out.array, "return_rstd": case.rstd}
    with using(device):
        result = call(x_there.array, None if weight_there is None else weight_there.array, 1e-5, **options)
    y, rstd = result if case.rstd else (result, None)
    assert y is out.array
    y = y.copy()
    np.testing.assert_array_equal(bits(x_there.array), bits(x), err_msg=f"{device}: x was changed")
    for array in (x_there, weight_there, out):
        if array is not None:
            array.assert_intact_around()
    return y, rstd


def hold(
    call: Call,
    on: Sequence[SimulatedDevice],
    case: Case,
    rng: np.random.Generator,
    layouts: Sequence[tuple[int, ...]] = (MISALIGNED,),
) -> tuple[np.ndarray, np.ndarray | None]:
    """Hold a case to the bound of float64 on the first device, and every other device and layout to the same bits."""
    x, weight = inputs(rng, case)
    first: tuple[np.ndarray, np.ndarray | None] | None = None
    for device, layout in itertools.product(on, layouts):
        y, rstd = run(call, device, case, x, weight, layout)
        if first is None:
            expected, expected_rstd = reference.rms_norm(x, weight, 1e-5, 0.5)
            reference.assert_close(y, expected, case.out)
            if rstd is not None:
                reference.assert_close(rstd, expected_rstd, FLOAT32, "rstd")
            first = y, rstd
            continue
        what = f"{device!r}, layout {layout}"
        np.testing.assert_array_equal(bits(y), bits(first[0]), err_msg=what)
        if rstd is not None:
            np.testing.assert_array_equal(bits(rstd), bits(first[1]), err_msg=f"rstd: {what}")
    # A row's bits do not depend on how many there are.
    alone, _ = run(call, on[0], case._replace(rows=1, rstd=False), x[-1:], weight, layouts[0])
    if not case.rstd:
        np.testing.assert_array_equal(bits(alone), bits(first[0][-1:]), err_msg="the last row alone")
    return first


class Configured:
    """The family of norms with one configuration, whatever the device is like."""

    name = FAMILY.name

    def __init__(self, config: NormConfig) -> None:
        self.config = config
        self.static, self.static_program = FAMILY.static, FAMILY.static_program

    def specialise(self, dtypes, columns, limits):
        assert limits.max_ctas_per_row >= self.config.ctas_per_row, "the device cannot hold a row's CTAs together"
        spec = NormSpec(
            "rms_norm_forward", dtypes["x"], dtypes["weight"], dtypes["out"], dtypes["rstd"] is not None, columns,
            self.config,
        )  # fmt: skip
        return spec, spec.launch_rule


@contextlib.contextmanager
def configured(config: NormConfig) -> Iterator[Call]:
    """Give an rms_norm of one configuration."""
    name = "rms_norm_configured"
    operator = dispatch.Operator(name, Configured(config), norms._RMS_NORM.arguments)

    def call(x, weight=None, eps=1e-6, *, weight_offset=0.0, out=None, out_dtype=None, return_rstd=False):
        return operator.call(x, weight, eps, weight_offset, out, out_dtype, return_rstd, None)

    try:
        yield call
    finally:
        del dispatch._operators[name]


def spec_of(case: Case, config: NormConfig) -> NormSpec:
    return NormSpec("rms_norm_forward", case.x, case.weight, case.out, case.rstd, case.hidden, config)


# ---- The table of cases --------------------------------------------------------------------------------------------


def _chosen() -> dict[str, tuple[Case, int]]:
    # Of each hidden size one case of one type and all of mixed ones, and every architecture in turn. Fewer rows than a
    # GPU gets: what many rows can show, few of a small grid do.
    found = {}
    per_hidden = len(CASES) // len(HIDDEN)
    for number, case in enumerate(CASES):
        hidden_number, of_hidden = divmod(number, per_hidden)
        if case.plain and of_hidden < len(FLOATS) and of_hidden != hidden_number % len(FLOATS):
            continue
        architecture = EVERY_ARCHITECTURE[(number + hidden_number) % len(EVERY_ARCHITECTURE)]
        case = case._replace(rows=max(1, min(case.rows, (1 << 16) // case.hidden)))
        found[f"sm_{architecture}-{case.name}"] = case, architecture
    return found


CHOSEN = _chosen()


@pytest.mark.parametrize("name", CHOSEN)
def test_every_case_is_within_the_bound_and_has_the_same_bits_in_every_order(name, kernels, rng):
    case, architecture = CHOSEN[name]
    compile_together(kernels, case.specialise(ARCHITECTURES[architecture])[0], architecture)
    hold(rms_norm, devices(architecture), case, rng)


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("number", range(len(CASES) // len(HIDDEN)))
def test_the_general_kernels_are_within_the_bound_in_every_order(number, architecture, rng):
    on = devices(architecture, static=True)
    turn = EVERY_ARCHITECTURE.index(architecture)
    for case in CASES[number :: len(CASES) // len(HIDDEN)][turn :: len(EVERY_ARCHITECTURE)]:
        hold(rms_norm, on, case._replace(rows=max(1, min(case.rows, (1 << 16) // case.hidden))), rng)


# ---- Every branch of the configuration table -----------------------------------------------------------------------


def _branches() -> dict[str, tuple[int, Case]]:
    """Return the smallest case that reaches each branch of `configure` on each architecture, once for equal kernels."""
    most_vectors = {2**power for power in range(6)} | {most for most, *_ in norms._ONE_CTA}
    most_vectors |= {ctas * threads * steps for ctas, threads, steps in norms._SHARED_ROW}
    found: dict[str, tuple[int, Case]] = {}
    seen = set()
    combinations, types = itertools.cycle(COMBINATIONS), ((BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32), (FLOAT16, FLOAT32))
    for most, more, (architecture, limits) in itertools.product(sorted(most_vectors), (0, 1), ARCHITECTURES.items()):
        x, out = types[len(found) % len(types)]
        hidden = most * (16 // max(x.bytes, out.bytes)) + more
        config = configure(hidden, x.bytes, out.bytes, limits)
        held = config.ctas_per_row * config.threads_per_row * config.vector * config.steps
        branch = (
            min(config.threads_per_row, 33), config.steps, config.rows_per_cta, config.ctas_per_row, config.clusters,
            config.in_shared, hidden > held,
        )  # fmt: skip
        if branch in seen:
            continue
        seen.add(branch)
        _, weight, _, rstd = next(combinations)
        case = Case(2 if hidden < 1 << 17 else 1, hidden, x, weight, out, rstd)
        found[f"sm_{architecture}-{spec_of(case, config).symbol}"] = architecture, case
    return found


BRANCHES = _branches()


def test_the_branches_are_those_of_the_table():
    configs = [
        configure(case.hidden, case.x.bytes, case.out.bytes, ARCHITECTURES[on]) for on, case in BRANCHES.values()
    ]
    one_cta = {(config.steps, config.rows_per_cta, config.in_shared) for config in configs if config.ctas_per_row == 1}
    assert one_cta >= {(steps, rows, in_shared) for _, steps, rows, in_shared in norms._ONE_CTA}
    for clusters in (False, True):
        shared = {(config.ctas_per_row, config.steps) for config in configs if config.clusters is clusters}
        assert shared >= {(ctas, steps) for ctas, _, steps in norms._SHARED_ROW} - ({(8, 8)} if not clusters else set())
        assert any(
            config.clusters is clusters and not config.in_shared for config in configs if config.ctas_per_row > 1
        )


@pytest.mark.parametrize("name", BRANCHES)
def test_every_branch_of_the_configuration_table(name, kernels, rng):
    architecture, case = BRANCHES[name]
    compile_together(kernels, case.specialise(ARCHITECTURES[architecture])[0], architecture)
    hold(rms_norm, devices(architecture), case, rng)


@pytest.mark.parametrize("hidden", [7, 1000, 16384])
def test_every_architecture_gives_the_same_bits_where_a_row_is_one_ctas(hidden, kernels, rng):
    case = Case(3, hidden, BFLOAT16, FLOAT32, BFLOAT16, True)
    config = configure(hidden, 2, 2, ARCHITECTURES[80])
    assert all(configure(hidden, 2, 2, limits) == config for limits in ARCHITECTURES.values())
    for architecture in EVERY_ARCHITECTURE:
        compile_together(kernels, spec_of(case, config), architecture)
    on = [device for architecture in EVERY_ARCHITECTURE for device in devices(architecture, seeds=())]
    hold(rms_norm, on, case, rng)


# ---- Configurations that only small rows can try -------------------------------------------------------------------

# (threads of a row, rows of a CTA, vector, steps, in shared memory, chunks, how far the last chunk is filled).
ONE_CTA = (
    (1, 64, 1, 1, False, 1, "whole"),
    (1, 32, 2, 3, False, 3, "one"),
    (2, 48, 4, 1, False, 4, "less_one"),
    (4, 24, 8, 2, False, 1, "less_one"),
    (8, 12, 2, 5, False, 3, "half"),
    (16, 6, 4, 7, False, 2, "one"),
    (32, 3, 8, 1, False, 4, "whole"),
    (32, 1, 8, 4, False, 3, "less_one"),
    (32, 8, 1, 6, False, 5, "half"),
    (64, 3, 4, 2, False, 3, "whole"),
    (96, 2, 8, 3, False, 1, "half"),
    (160, 1, 2, 8, False, 3, "one"),
    (288, 1, 4, 1, False, 3, "less_one"),
    (544, 1, 8, 1, False, 1, "less_one"),
    (1024, 1, 1, 1, False, 5, "half"),
    (32, 1, 8, 2, True, 1, "whole"),
    (64, 1, 4, 2, True, 1, "less_one"),
    (96, 1, 8, 3, True, 1, "half"),
    (128, 1, 8, 4, True, 1, "one"),
    (160, 1, 8, 5, True, 1, "whole"),
    (224, 1, 4, 6, True, 1, "less_one"),
    (512, 1, 8, 7, True, 1, "half"),
    (1024, 1, 4, 8, True, 1, "less_one"),
)
# (CTAs of a row, threads, vector, steps, in shared memory, chunks, how far the last chunk is filled).
MANY_CTAS = (
    (2, 32, 8, 1, False, 1, "whole"),
    (2, 64, 8, 2, False, 1, "whole"),
    (2, 96, 4, 2, True, 1, "less_one"),
    (2, 64, 2, 3, False, 3, "one"),
    (4, 64, 4, 1, False, 5, "half"),
    (4, 160, 8, 8, True, 1, "half"),
    (4, 256, 8, 4, False, 3, "whole"),
    (8, 96, 8, 2, True, 1, "one"),
    (8, 96, 4, 5, True, 1, "whole"),
    (8, 64, 8, 4, False, 4, "less_one"),
    (16, 96, 4, 6, True, 1, "less_one"),
    (16, 64, 8, 8, True, 1, "half"),
    (16, 32, 8, 4, False, 3, "one"),
    (8, 544, 1, 1, False, 2, "half"),
)


def _shaped(number: int, ctas: int, threads: int, rows: int, shape: tuple[Any, ...]) -> tuple[Case, NormConfig]:
    vector, steps, in_shared, chunks, filled = shape
    # A step that shares no factor with the table's 72 combinations goes through all of them.
    x, weight, out, rstd = COMBINATIONS[number * 29 % len(COMBINATIONS)]
    vector = min(vector, 16 // max(x.bytes, out.bytes))
    if in_shared:
        vector = max(vector, 4 // x.bytes)  # no copy to shared memory is shorter
    config = NormConfig(threads, rows, vector, steps, ctas, in_shared=in_shared)
    capacity = ctas * threads * vector * steps
    last = {"whole": capacity, "less_one": capacity - 1, "half": capacity // 2 + 1, "one": 1}[filled]
    return Case(3 * rows + 1, capacity * (chunks - 1) + last, x, weight, out, rstd), config


def _named(found: list[tuple[Case, NormConfig]]) -> dict[str, tuple[Case, NormConfig]]:
    return {spec_of(case, config).symbol.removeprefix("rms_norm_forward_"): (case, config) for case, config in found}


SMALL = _named([_shaped(number, 1, shape[0], shape[1], shape[2:]) for number, shape in enumerate(ONE_CTA)])
SHARED = _named(
    [_shaped(number, shape[0], shape[1], 1, shape[2:]) for number, shape in enumerate(MANY_CTAS, len(ONE_CTA))]
)


@pytest.mark.parametrize("name", SMALL)
def test_one_cta_with_any_number_of_chunks_steps_warps_and_rows(name, kernels, rng):
    case, config = SMALL[name]
    architecture = EVERY_ARCHITECTURE[list(SMALL).index(name) % len(EVERY_ARCHITECTURE)]
    compile_together(kernels, spec_of(case, config), architecture)
    with configured(config) as call:
        hold(call, devices(architecture, seeds=(1, 2)), case, rng, (ALIGNED, MISALIGNED))


def few(architecture: int, spec: NormSpec) -> int:
    """Return the fewest multiprocessors that hold a row's CTAs together."""
    # A kernel's static shared memory is some hundred bytes.
    rule = spec.launch_rule
    held = SimulatedDevice(architecture).max_active_ctas(rule.threads, rule.dynamic_shared_memory + 1024)
    return -(-rule.ctas_per_row // held)


@pytest.mark.parametrize("name", SHARED)
def test_ctas_that_share_a_row_give_the_same_bits_in_a_cluster_and_in_a_grid(name, kernels, rng):
    case, config = SHARED[name]
    turn = list(SHARED).index(name)
    in_grid = (*WITHOUT_CLUSTERS, *WITH_CLUSTERS)[turn % len(EVERY_ARCHITECTURE)]
    able = [
        architecture for architecture in WITH_CLUSTERS
        if ARCHITECTURES[architecture].max_cluster_size >= config.ctas_per_row
    ]  # fmt: skip
    in_cluster = able[turn % len(able)]
    x, weight = inputs(rng, case._replace(rows=3))
    answers = []
    ways = [(in_cluster, True)]
    # In a grid, nothing but a barrier of several warps orders a round's reads before a later round's writes.
    if config.threads_per_row > 32:
        ways.append((in_grid, False))
    for architecture, clusters in ways:
        ours = dataclasses.replace(config, clusters=clusters)
        spec = spec_of(case, ours)
        compile_together(kernels, spec, architecture)
        multiprocessors = few(architecture, spec)
        on = devices(architecture, seeds=(1, 2), multiprocessors=multiprocessors)
        rule = spec.launch_rule
        resident = multiprocessors * kernels.get(spec, on[0]).max_active_ctas(
            (rule.threads, 1, 1), rule.dynamic_shared_memory
        )
        # In a grid, each group of CTAs takes four rows, one after the other, or one more than another group does.
        rows = 5 if clusters else 3 * (resident // config.ctas_per_row) + 1
        with configured(ours) as call:
            hold(call, on, case._replace(rows=rows), rng, (ALIGNED, MISALIGNED))
            answers.append(run(call, on[0], case._replace(rows=3), x, weight, ALIGNED))
    for y, rstd in answers[1:]:
        np.testing.assert_array_equal(bits(y), bits(answers[0][0]))
        if rstd is not None:
            np.testing.assert_array_equal(bits(rstd), bits(answers[0][1]))


def test_a_grid_with_workspace_launched_by_hand(kernels, rng):
    # One group of two CTAs takes seven rows of five chunks, and the caller is the one who zeroes the workspace.
    config = NormConfig(64, 1, 4, 2, 2)
    rows, hidden = 7, 4 * 64 * 8 * 2 + 100
    case = Case(rows, hidden, FLOAT32, FLOAT32, FLOAT32, True)
    spec = spec_of(case, config)
    x, weight = inputs(rng, case)
    expected, expected_rstd = reference.rms_norm(x, weight, 1e-5, 0.25)
    launch = LaunchConfig((2, 1, 1), (64, 1, 1), (1, 1, 1), spec.launch_rule.dynamic_shared_memory, cooperative=True)
    seen = []
    for device in devices(80):
        y, rstd = np.full_like(x, np.nan), np.full(rows, np.nan, np.float32)
        workspace = np.zeros(spec.launch_rule.workspace_bytes, np.uint8)
        kernels.get(spec, device).launch(
            launch,
            {
                "x": x, "weight": weight, "out": y, "rstd": rstd, "x_outer_stride": hidden, "x_inner_stride": 0,
                "out_outer_stride": hidden, "out_inner_stride": 0, "rows": rows, "inner_count": 1, "inner_magic": 0,
                "inner_shift": 0, "eps": 1e-5, "weight_offset": 0.25, "workspace": workspace,
            },
        )  # fmt: skip
        assert workspace[:4].view(np.uint32)[0] == 2 * rows, "each CTA has arrived once for each row"
        seen.append((y, rstd))
    reference.assert_close(seen[0][0], expected, FLOAT32)
    reference.assert_close(seen[0][1], expected_rstd, FLOAT32, "rstd")
    for y, rstd in seen[1:]:
        np.testing.assert_array_equal(bits(y), bits(seen[0][0]))
        np.testing.assert_array_equal(bits(rstd), bits(seen[0][1]))


@pytest.mark.parametrize(
    ("architecture", "hidden"), [(80, 257), (89, 5000), (80, 33_000), (90, 33_000), (100, 65_537), (120, 65_537)]
)
def test_twenty_random_orders(architecture, hidden, kernels, rng):
    case = Case(5, hidden, FLOAT32, BFLOAT16, FLOAT16, True)
    on = devices(architecture, seeds=range(20), multiprocessors=8)
    hold(rms_norm, on, case, rng)


# ---- Where rows lie ------------------------------------------------------------------------------------------------

_SOME_HIDDEN = (1, 2, 3, 7, 8, 31, 64, 129, 256, 1000, 1021, 4096, 4097, 16384, 16411)


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    list(zip(_SOME_HIDDEN, itertools.cycle(FLOATS))),
    ids=lambda value: getattr(value, "symbol", None),
)
def test_every_alignment_gives_the_same_bits_and_writes_nothing_else(hidden, dtype, static, kernels, rng):
    case = Case(3, hidden, dtype, dtype, dtype, True)
    on = devices(80, seeds=(), static=static)
    if not static:
        compile_together(kernels, case.specialise(ARCHITECTURES[80])[0], 80)
    # Offsets of x, weight and out, each alone and together, and rows padded by an odd number of elements as well.
    layouts = [ALIGNED]
    for offset in range(1, 9):
        layouts += [(offset, 0, 0, 16), (0, offset, 0, 16), (0, 0, offset, 16), (offset, offset, offset, 1)]
        layouts += [(offset, 0, 8 - offset, 7)]
    hold(rms_norm, on, case, rng, layouts if hidden <= 4097 else layouts[::4])


@pytest.mark.parametrize("out_type", FLOATS, ids=lambda dtype: f"out_{dtype.symbol}")
@pytest.mark.parametrize("x_type", FLOATS, ids=lambda dtype: dtype.symbol)
def test_a_misaligned_output_of_another_type(x_type, out_type, rng):
    for hidden in (2, 127, 4096):
        case = Case(3, hidden, x_type, x_type, out_type, False)
        layouts = [ALIGNED, *((0, 0, offset, hidden + offset) for offset in (1, 2, 3, 5))]
        hold(rms_norm, devices(90, seeds=()), case, rng, layouts)


def _same_in_place(device: SimulatedDevice, x: np.ndarray, weight: np.ndarray, expected: np.ndarray) -> None:
    with using(device):
        assert rms_norm(x, weight, out=x) is x
    np.testing.assert_array_equal(bits(x), bits(expected), err_msg=str(device))


@pytest.mark.parametrize("hidden", (1, 7, 128, 1000, 4097, 16385, 65537))
@pytest.mark.parametrize("architecture", [80, 90])
def test_in_place_gives_the_same_bits(hidden, architecture, rng):
    dtype = FLOATS[hidden % 3]
    x, weight = inputs(rng, Case(5, hidden, dtype, dtype, dtype, False))
    for static in (False, True):
        on = devices(architecture, static=static)
        with using(on[0]):
            expected = rms_norm(x, weight)
        for device, offset in itertools.product(on, (0, 1)):
            there = Guarded(x.shape, dtype, offset).fill(x)
            _same_in_place(device, there.array, weight, expected)
            there.assert_intact_around()


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize(("hidden", "dtype"), [(64, BFLOAT16), (80, FLOAT16), (127, FLOAT32)])
def test_heads_inside_a_packed_qkv(hidden, dtype, static, rng):
    tokens, heads = 5, 3
    x, weight = inputs(rng, Case(tokens * 3 * heads, hidden, dtype, FLOAT32, dtype, False))
    x = x.reshape(tokens, 3 * heads, hidden)
    expected = reference.rms_norm(x, weight)[0]
    results = []
    for device in devices(89, static=static):
        packed = Guarded(x.shape, dtype, 1).fill(x)
        q, k, v = (packed.array[:, part * heads : (part + 1) * heads] for part in range(3))
        with using(device):
            y, rstd = rms_norm(k, weight, return_rstd=True)
            assert y.flags.c_contiguous and rstd.shape == (tokens, heads)
            reference.assert_close(y, expected[:, heads : 2 * heads], dtype)
            # From v into k, and in place: q stays as it is.
            assert rms_norm(v, weight, out=k) is k
            rms_norm(v, weight, out=v)
        np.testing.assert_array_equal(bits(q), bits(x[:, :heads]))
        np.testing.assert_array_equal(bits(k), bits(v))
        reference.assert_close(v, expected[:, 2 * heads :], dtype)
        results.append(bits(y))
        packed.assert_intact_around()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_two_strides_in_any_order_backwards_and_without_end(static, rng):
    x, weight = inputs(rng, Case(6 * 10 * 7, 200, FLOAT32, FLOAT32, FLOAT32, False))
    x = x.reshape(6, 10, 7, 200)
    views = {
        "every seventh": x[:, :, 3],
        "a block": x[2:, 1:9],
        "permuted": x.transpose(1, 2, 0, 3)[..., 2, :],
        "transposed": x[:, 4].transpose(1, 0, 2),
        "every other": x[::2, None],
        "one row": x[0, 0, 0],
        "backwards": x[::-1, 2, 1],
        "backwards in both": x[::-2, ::-3, 4],
        "backwards in one": x[:, ::-1, 4],
        "expanded outside": np.broadcast_to(x[:1], (5, 10, 7, 200)),
        "expanded inside": np.broadcast_to(x[:, :1, 0], (6, 9, 200)),
        "all one row": np.broadcast_to(x[3, 3, 3], (4, 5, 200)),
    }
    for name, view in views.items():
        expected = reference.rms_norm(view, weight)[0]
        answers = []
        for device in devices(100, static=static):
            out = Guarded(view.shape, FLOAT32)
            with using(device):
                y = rms_norm(view, weight)
                assert rms_norm(view, weight, out=out.array) is out.array
            assert y.shape == view.shape and y.flags.c_contiguous, name
            np.testing.assert_array_equal(bits(out.array), bits(y), err_msg=name)
            out.assert_intact_around()
            answers.append(y)
        reference.assert_close(answers[0], expected, FLOAT32, name)
        for y in answers[1:]:
            np.testing.assert_array_equal(bits(y), bits(answers[0]), err_msg=name)


def test_outputs_of_any_strides(rng):
    x, weight = inputs(rng, Case(5 * 6, 100, FLOAT32, FLOAT32, FLOAT32, False))
    x = x.reshape(5, 6, 100)
    memory = np.empty((5, 9, 111), np.float32)
    for place in (
        (slice(None), slice(2, 8), slice(7, 107)),
        (slice(None, None, -1), slice(1, 7), slice(3, 103)),
        (slice(None), slice(7, 1, -1), slice(3, 103)),
    ):
        for device in devices(120):
            memory.fill(np.nan)
            out = memory[place]
            with using(device):
                assert rms_norm(x, weight, out=out) is out
            reference.assert_close(out, reference.rms_norm(x, weight)[0], FLOAT32)
            out.fill(np.nan)
            assert np.isnan(memory).all()


def sparse(elements: int, dtype: DType) -> np.ndarray:
    """Return memory that costs what is touched of it."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        memory = mmap.mmap(-1, elements * dtype.bytes, flags=flags)
    except OSError as error:
        pytest.skip(f"this machine gives no {elements * dtype.bytes >> 30} GiB of sparse memory: {error}")
    return np.frombuffer(memory, reference.NUMPY_TYPES[dtype])


_FAR = (2**31 + 24, 2**32 + 8, 2**32 + 1)
# What a row of 1000 columns is for kernels of one CTA, of a cluster and of a grid, of several rows in a CTA, and in
# shared memory.
_FAR_CONFIGS = {
    "narrow": NormConfig(8, 4, 8, 2),
    "shared": NormConfig(64, 1, 8, 2, in_shared=True),
    "cluster": NormConfig(64, 1, 4, 1, 2, clusters=True),
    "grid": NormConfig(64, 1, 4, 1, 2),
    "general": None,
}


@pytest.mark.parametrize("name", _FAR_CONFIGS)
@pytest.mark.parametrize("stride", _FAR)
def test_rows_and_heads_farther_apart_than_32_bits_reach(stride, name, rng):
    config, rows, heads, hidden = _FAR_CONFIGS[name], 4, 3, 1000
    dtype = BFLOAT16 if name != "grid" else FLOAT16
    x, _ = inputs(rng, Case(rows * heads, hidden, dtype, None, dtype, False))
    expected = reference.rms_norm(x)[0]
    strided = np.lib.stride_tricks.as_strided
    size = dtype.bytes
    on = devices(90 if name != "grid" else 80, seeds=(), static=config is None)
    with contextlib.nullcontext(rms_norm) if config is None else configured(config) as call:
        for shape, strides in (
            ((rows, hidden), (stride, 1)),
            # Far heads of rows that are near to each other, and the other way round.
            ((rows, heads, hidden), (2 * hidden, stride, 1)),
            ((rows, heads, hidden), (stride, 2 * hidden, 1)),
        ):
            reach = sum((extent - 1) * way for extent, way in zip(shape, strides, strict=True)) + 1
            count = math.prod(shape[:-1])
            byte_strides = [way * size for way in strides]
            far_x = strided(sparse(reach, dtype), shape, byte_strides)
            far_x[...] = x[:count].reshape(shape)
            far_out = strided(sparse(reach, dtype), shape, byte_strides)
            for device in on:
                for backwards in (False, True):
                    way = slice(None, None, -1 if backwards else None)
                    far_out[...] = np.nan
                    with using(device):
                        near = call(far_x[way])
                        assert call(x[:count].reshape(shape)[way], out=far_out[way]) is not None
                    wanted = expected[:count].reshape(shape)[way]
                    reference.assert_close(near, wanted, dtype)
                    np.testing.assert_array_equal(bits(far_out[way]), bits(near))


# ---- Values that are no ordinary numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", (1, 3, 64, 129, 1000, 4096, 16385))
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
def test_infinity_nan_and_zeros_stay_in_their_rows(hidden, dtype, rng):
    x, weight = inputs(rng, Case(8, hidden, dtype, dtype, dtype, True))
    # The last element too: where a row ends, loads differ.
    x[1, rng.integers(hidden)], x[2, -1] = np.inf, -np.inf
    x[3, rng.integers(hidden)], x[4, -1] = np.nan, np.nan
    x[5] = 0
    x[6] = -0.0
    expected, expected_rstd = reference.rms_norm(x, weight)
    for device in (*devices(80, seeds=()), *devices(80, seeds=(), static=True)):
        with using(device):
            y, rstd = rms_norm(x, weight, return_rstd=True)
        reference.assert_close(y, expected, dtype)
        reference.assert_close(rstd, expected_rstd, FLOAT32, "rstd")


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_values_at_the_ends_of_the_types(static, rng):
    for device in devices(90, seeds=(), static=static):
        with using(device):
            y, rstd = rms_norm(np.zeros((3, 100), np.float32), eps=0.0, return_rstd=True)
            assert np.isnan(y).all() and np.isposinf(rstd).all(), "zero times infinity"
            x, weight = np.ones((2, 40), np.float32), np.full(40, 1e6, np.float32)
            weight[1::2] *= -1
            y = rms_norm(x, weight, out_dtype="float16")
            np.testing.assert_array_equal(y, np.sign(weight) * np.full((2, 40), np.inf))
            # Subnormals of each type, as inputs, as weights and as outputs.
            for dtype in FLOATS:
                kind = reference.NUMPY_TYPES[dtype]
                integers = _BITS[dtype.bytes]
                smallest = np.arange(1, 258, dtype=integers)
                x = np.stack([smallest.view(kind), -smallest.view(kind), np.ones(257, kind)])
                weight = smallest[::-1].copy().view(kind)
                for eps in (1e-6, 1e-30):
                    reference.assert_close(rms_norm(x, eps=eps), reference.rms_norm(x, eps=eps)[0], dtype)
                    reference.assert_close(rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps)[0], dtype)


@pytest.mark.parametrize("exponent", [-130, -60, -20, 40, 55])
@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_tiny_and_huge_rows(static, exponent, rng):
    # Squares of up to 2^126 are no overflow; those below the smallest number vanish beside eps.
    for dtype in (FLOAT32, BFLOAT16):
        x = (rng.standard_normal((6, 257)) * 2.0**exponent).astype(reference.NUMPY_TYPES[dtype])
        for device in devices(90, seeds=(), static=static):
            with using(device):
                reference.assert_close(rms_norm(x), reference.rms_norm(x)[0], dtype)


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
def test_eps_and_the_weights_offset_are_the_callers(static, rng):
    for dtype in FLOATS:
        x, weight = inputs(rng, Case(9, 300, dtype, dtype, dtype, False))
        for device in devices(90, seeds=(), static=static):
            with using(device):
                for eps, offset in itertools.product((0.0, 1e-6, 0.1, 3), (0.0, 1.0, -0.5, 0.1)):
                    y = rms_norm(x, weight, eps, weight_offset=offset)
                    reference.assert_close(y, reference.rms_norm(x, weight, eps, offset)[0], dtype)
                np.testing.assert_array_equal(bits(rms_norm(x, weight_offset=1.0)), bits(rms_norm(x)))


def test_a_nan_in_the_weight_reaches_its_column_and_no_other(rng):
    x, weight = inputs(rng, Case(8, 1000, BFLOAT16, BFLOAT16, BFLOAT16, False))
    weight[[0, 500, 999]] = np.nan
    for device in (*devices(90), *devices(90, static=True)):
        with using(device):
            reference.assert_close(rms_norm(x, weight), reference.rms_norm(x, weight)[0], BFLOAT16)


# ---- A row's bits do not depend on the others ----------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True], ids=["specialised", "general"])
@pytest.mark.parametrize(
    ("hidden", "architecture"),
    [(1, 80), (5, 120), (64, 89), (129, 100), (1000, 90), (4097, 80), (65536, 80), (65537, 90)],
)
def test_a_rows_bits_are_the_same_alone_and_among_many(hidden, architecture, static, rng):
    dtype = FLOATS[hidden % 3]
    probe, weight = inputs(rng, Case(1, hidden, dtype, dtype, dtype, False))
    checked, last_in, shuffled = devices(architecture, static=static, multiprocessors=8)
    with using(checked):
        alone = bits(rms_norm(probe, weight))[0]
    for rows in (1, 2, 3, 7, 129, 517):
        if rows * hidden > 1 << 20:
            continue
        x = reference.random_rows(rng, (rows, hidden), dtype)
        places = sorted({0, 1 % rows, rows // 2, rows - 1, int(rng.integers(rows))})
        x[places] = probe[0]
        for device in (checked, last_in, shuffled) if rows * hidden < 1 << 18 else (last_in, shuffled):
            with using(device):
                y = rms_norm(x, weight)
            for place in places:
                np.testing.assert_array_equal(bits(y[place]), alone, err_msg=f"row {place} of {rows}, {device!r}")


@pytest.mark.parametrize("leading", [(0,), (0, 3), (3, 0, 2)])
def test_no_rows_give_an_empty_output(leading):
    for device in (SimulatedDevice(checked=True), SimulatedDevice(static=True)):
        with using(device):
            y, rstd = rms_norm(np.zeros((*leading, 300), np.float16), return_rstd=True)
        assert (y.shape, y.dtype, rstd.shape, rstd.dtype) == ((*leading, 300), np.float16, leading, np.float32)
