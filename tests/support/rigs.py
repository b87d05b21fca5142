"""What the tests of the simulated kernels share: devices, arrays with guards around them, and cases on both."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import calls
import numpy as np
import pytest
import reference
from cases import FAMILY, Case

from transformer_rtc import KernelManager, SimulatedDevice, dispatch, using
from transformer_rtc.ops import norms
from transformer_rtc.ops.norm_configurations import NormConfig
from transformer_rtc.ops.norm_general import GeneralSpec
from transformer_rtc.ops.norm_kernels import BackwardSpec, ForwardSpec
from transformer_rtc.spec import ARCHITECTURES, DType, Target

EVERY_ARCHITECTURE = tuple(ARCHITECTURES)
WITH_CLUSTERS = tuple(architecture for architecture, limits in ARCHITECTURES.items() if limits.max_cluster_size > 1)
WITHOUT_CLUSTERS = tuple(architecture for architecture in ARCHITECTURES if architecture not in WITH_CLUSTERS)
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# What a row gives whatever the other rows are.
OF_ROWS = ("out", "residual_out", "mean", "rstd", "row_scale")


def devices(architecture: int, seeds: Sequence[int] = (1,), **options: Any) -> tuple[SimulatedDevice, ...]:
    """Return the gate, which checks every access, and what numbers are tried with besides."""
    if options.get("static"):
        architecture = 90  # general kernels are the same text for each, and take seconds to compile
    return (
        SimulatedDevice(architecture, checked=True, **options),
        SimulatedDevice(architecture, order="last_in", **options),
        *(SimulatedDevice(architecture, order="random", seed=seed, **options) for seed in seeds),
    )


def compile_together(kernels: KernelManager, stages: Sequence[tuple[Any, Any]], architecture: int) -> None:
    """Compile both modes at once, on two cores."""
    targets = [Target(architecture, mode) for mode in ("checked", "fast")]
    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(lambda pair: kernels.image(pair[0][0], pair[1]), itertools.product(stages, targets)))


def bits(array: np.ndarray) -> np.ndarray:
    """Return elements as integers, so that NaN and the sign of zero count."""
    return np.ascontiguousarray(array).view(BITS[array.itemsize])


def assert_same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(bits(array), bits(expected[name]), err_msg=f"{name}: {what}")


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
        # All bits set is a NaN of every type that has one.
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


# Offsets in elements of arrays of rows, of columns and of outputs, and elements that pad their rows to a multiple.
ALIGNED = (0, 0, 0, 16)
MISALIGNED = (1, 3, 5, 1)
SECOND_MISALIGNED = (0, 0, 16, 16)  # only the second output


def _placed(case: Case, dtype: DType, layout: tuple[int, ...], offset: int) -> Guarded:
    """Return memory for an array of rows: padded, and heads farther apart than rows are."""
    stride = -(-case.hidden // layout[-1]) * layout[-1]
    strides = (stride, 1) if case.heads == 0 else (case.heads * stride + 2 * layout[-1], stride, 1)
    return Guarded(case.shape, dtype, offset, strides)


def run(
    device: SimulatedDevice,
    case: Case,
    given: Mapping[str, np.ndarray],
    layout: tuple[int, ...] = ALIGNED,
    in_place: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Run a case on arrays that lie as told, with NaN around each; `in_place` says which input an output replaces."""
    in_place = in_place or {}
    of_rows, of_columns, of_outputs, _ = layout
    there: dict[str, Guarded] = {}
    for number, (name, dtype) in enumerate(calls.input_types(case).items()):
        if given[name].shape == case.shape:
            there[name] = _placed(case, dtype, layout, of_rows and of_rows + number)
        else:
            there[name] = Guarded(given[name].shape, dtype, of_columns and of_columns + number)
        there[name].fill(given[name])
    made = {}
    for name, dtype in calls.result_types(case).items():
        if name in in_place:
            made[name] = there[in_place[name]]
        elif name in ("out", "residual_out"):
            made[name] = _placed(case, dtype, layout, of_outputs and of_outputs + len(made))
        elif name in ("amax", "scale_inv"):
            made[name] = Guarded((1,), dtype, of_outputs).fill(np.full(1, calls.BEFORE, np.float32))
    with using(device):
        results = calls.call(
            case,
            {name: place.array for name, place in there.items()},
            {name: place.array for name, place in made.items()},
        )
    for name, place in made.items():
        assert results[name] is place.array, name
    results = {name: array.copy() for name, array in results.items()}
    for name, place in there.items():
        if name not in in_place.values():
            np.testing.assert_array_equal(bits(place.array), bits(given[name]), err_msg=f"{device}: {name} was changed")
    for place in {id(place): place for place in (*there.values(), *made.values())}.values():
        place.assert_intact_around()
    return results


def rows_of(case: Case, given: Mapping[str, np.ndarray], keep: slice) -> tuple[Case, dict[str, np.ndarray]]:
    """Return a case of some of its rows, or of its tokens where rows are heads."""
    kept = {
        name: array[keep] if name in OF_ROWS or array.shape == case.shape else array for name, array in given.items()
    }
    return case._replace(rows=kept["x"].size // case.hidden), kept


def hold(
    on: Sequence[SimulatedDevice],
    case: Case,
    rng: np.random.Generator,
    layouts: Sequence[tuple[int, ...]] = (MISALIGNED,),
    given: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Hold a case to the bound of float64 on the first device, and every other device and layout to the same bits."""
    given = given or calls.make_inputs(rng, case)
    first: dict[str, np.ndarray] = {}
    for device, layout in itertools.product(on, layouts):
        results = run(device, case, given, layout)
        if first:
            assert_same_bits(results, first, f"{device!r}, layout {layout}")
        else:
            calls.hold_within(case, results, calls.expect(case, given))
            first = results
    # A row's bits do not depend on how many there are.
    alone = run(on[-1], *rows_of(case, given, slice(-1, None)), layouts[0])
    same = [name for name in alone if name in OF_ROWS]
    assert_same_bits(
        {name: alone[name] for name in same}, {name: first[name][-1:] for name in same}, "the last row alone"
    )
    return first


def reconfigured(stages: Sequence[tuple[Any, Any]], config: NormConfig) -> tuple[tuple[Any, Any], ...]:
    """Return launches whose rows are divided as told."""
    (spec, _), *others = stages
    assert isinstance(spec, (ForwardSpec, BackwardSpec)), "a row that no specialised kernel holds"
    spec = dataclasses.replace(spec, config=config)
    found = [(spec, spec.launch_rule)]
    for finish, rule in others:
        found.append((dataclasses.replace(finish, rows_per_group=spec.rows_per_group), rule))
    return tuple(found)


class Configured:
    """The family of norms with one configuration; None: with the general kernels, each compiled alone."""

    name = FAMILY.name

    def __init__(self, config: NormConfig | None, operator: str) -> None:
        self.config, self.operator = config, operator
        self.static_program = FAMILY.static_program

    def check(self, request):
        FAMILY.check(request._replace(operator=self.operator))

    def static(self, request):
        return FAMILY.static(request._replace(operator=self.operator))

    def specialise(self, request, limits):
        if self.config is None:
            return tuple((GeneralSpec.of(kernel.symbol, request), rule) for kernel, rule in self.static(request))
        assert limits.max_ctas_per_row >= self.config.ctas_per_row, "the device cannot hold a row's CTAs together"
        return reconfigured(FAMILY.specialise(request._replace(operator=self.operator), limits), self.config)


@contextlib.contextmanager
def configured(operator: str, config: NormConfig | None) -> Iterator[None]:
    """Have an operator divide its rows by one configuration."""
    name = f"{operator}_configured"
    made = dispatch.Operator(name, Configured(config, operator), dispatch.operators()[operator].arguments)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(norms, f"_{operator}", made.call)
            yield
    finally:
        del dispatch._operators[name]


def few(architecture: int, rule: dispatch.LaunchRule) -> int:
    """Return the fewest multiprocessors that hold a row's CTAs together."""
    # A kernel's static shared memory is some hundred bytes.
    held = SimulatedDevice(architecture).max_active_ctas(rule.threads, rule.dynamic_shared_memory + 1024)
    return -(-rule.ctas_per_row // held)
