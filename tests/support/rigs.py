# SPDX-License-Identifier: Apache-2.0
"""Where a check of the norm family runs: an implementation and a kind of arrays, and cases on arrays of any layout.

The same checks run in the simulator, on numpy's arrays, and on a GPU, on torch's tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import calls
import numpy as np
import pytest
from cases import FAMILY, Case
from frameworks import Framework, Guarded, bits

import transformer_rtc
from transformer_rtc import SimulatedDevice, using
from transformer_rtc.declaration import declaration_of
from transformer_rtc.device import Gpu
from transformer_rtc.operator import Operator
from transformer_rtc.ops.division import RowDivision
from transformer_rtc.request import LaunchRule
from transformer_rtc.spec import STATIC_ARCHITECTURES, DType

EVERY_ARCHITECTURE = tuple(STATIC_ARCHITECTURES)
WITH_CLUSTERS = tuple(
    architecture for architecture, limits in STATIC_ARCHITECTURES.items() if limits.max_cluster_size > 1
)
WITHOUT_CLUSTERS = tuple(architecture for architecture in STATIC_ARCHITECTURES if architecture not in WITH_CLUSTERS)
EVERY_ORDER = ("first_in", "last_in", "random")
# What a row gives whatever the other rows are.
OF_ROWS = ("out", "residual_out", "mean", "rstd", "row_scale")


class Rig:
    """An implementation, and the kind of arrays that it is given."""

    def __init__(self, implementation: str | SimulatedDevice, arrays: Framework | None = None) -> None:
        self.implementation, self.arrays = implementation, arrays or Framework()

    def __repr__(self) -> str:
        return f"{self.implementation!r} on {self.arrays.name}"

    @property
    def simulated(self) -> bool:
        return isinstance(self.implementation, SimulatedDevice)

    @property
    def multiprocessors(self) -> int:
        return self.implementation.multiprocessors if self.simulated else Gpu(0).multiprocessors

    def guarded(self, *arguments: Any) -> Guarded:
        return Guarded(self.arrays, *arguments)

    def call(self, case: Case, given: Mapping[str, Any], outputs: Any = None, **options: Any) -> dict[str, Any]:
        """Call a case's operator with arrays of this rig."""
        with using(self.implementation):
            return calls.call(case, given, outputs, **options)

    def on_device(self, given: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.arrays.array(host) for name, host in given.items()}

    def on_host(self, results: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self.arrays.host(array) for name, array in results.items()}

    def __call__(self, operator: str, *given: Any, **options: Any) -> Any:
        """Call an operator with arrays of the host; return its results there."""
        given = tuple(self.arrays.array(one) if isinstance(one, np.ndarray) else one for one in given)
        options = {key: self.arrays.array(one) if isinstance(one, np.ndarray) else one for key, one in options.items()}
        with using(self.implementation):
            results = getattr(transformer_rtc, operator)(*given, **options)
        if not isinstance(results, tuple):
            return self.arrays.host(results)
        return tuple(map(self.arrays.host, results))


def simulated(
    architecture: int = 90, orders: Sequence[str] = ("first_in",), seeds: Sequence[int] = (1,), **options: Any
) -> tuple[Rig, ...]:
    """Return the simulator in checked mode, once for each order of threads: they share what is compiled."""
    if options.get("static"):
        architecture = 90  # general kernels are the same text for each, and take seconds to compile
    options = {"checked": True, **options}
    return tuple(
        Rig(SimulatedDevice(architecture, order=order, seed=seed, **options))
        for order in orders
        for seed in (seeds if order == "random" else (0,))
    )


def assert_same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(bits(array), bits(expected[name]), err_msg=f"{name}: {what}")


# Offsets in elements of arrays of rows, of columns and of outputs, and elements that pad their rows to a multiple.
ALIGNED = (0, 0, 0, 16)
MISALIGNED = (1, 3, 5, 1)
SECOND_MISALIGNED = (0, 0, 16, 16)  # only the second output


def _placed(rig: Rig, case: Case, dtype: DType, layout: tuple[int, ...], offset: int) -> Guarded:
    """Return memory for an array of rows: padded, and heads farther apart than rows are."""
    stride = -(-case.hidden // layout[-1]) * layout[-1]
    strides = (stride, 1) if case.heads == 0 else (case.heads * stride + 2 * layout[-1], stride, 1)
    return rig.guarded(case.shape, dtype, offset, strides)


def run(
    rig: Rig,
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
            there[name] = _placed(rig, case, dtype, layout, of_rows and of_rows + number)
        else:
            there[name] = rig.guarded(given[name].shape, dtype, of_columns and of_columns + number)
        there[name].fill(given[name])
    made: dict[str, Guarded] = {}
    for name, dtype in calls.result_types(case).items():
        if name in in_place:
            made[name] = there[in_place[name]]
        elif name in ("out", "residual_out"):
            made[name] = _placed(rig, case, dtype, layout, of_outputs and of_outputs + len(made))
        elif name in ("amax", "scale_inv"):
            made[name] = rig.guarded((1,), dtype, of_outputs).fill(np.full(1, calls.BEFORE, np.float32))
    results = rig.call(
        case,
        {name: place.array for name, place in there.items()},
        {name: place.array for name, place in made.items()},
    )
    for name, place in made.items():
        assert results[name] is place.array, name
    found = {name: array.copy() for name, array in rig.on_host(results).items()}
    for name, place in there.items():
        if name not in in_place.values():
            host = rig.arrays.host(place.array)
            np.testing.assert_array_equal(bits(host), bits(given[name]), err_msg=f"{rig}: {name} was changed")
    for place in {id(place): place for place in (*there.values(), *made.values())}.values():
        place.assert_intact_around()
    return found


def rows_of(case: Case, given: Mapping[str, np.ndarray], keep: slice) -> tuple[Case, dict[str, np.ndarray]]:
    """Return a case of some of its rows, or of its tokens where rows are heads."""
    kept = {
        name: array[keep] if name in OF_ROWS or array.shape == case.shape else array for name, array in given.items()
    }
    return case._replace(rows=kept["x"].size // case.hidden), kept


def hold(
    on: Sequence[Rig],
    case: Case,
    rng: np.random.Generator,
    layouts: Sequence[tuple[int, ...]] = (MISALIGNED,),
    given: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Hold a case to the bound of float64 on the first rig, and every other rig and layout to the same bits."""
    given = given or calls.make_inputs(rng, case)
    first: dict[str, np.ndarray] = {}
    for rig, layout in itertools.product(on, layouts):
        results = run(rig, case, given, layout)
        if first:
            assert_same_bits(results, first, f"{rig}, layout {layout}")
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


# ---- Configurations ------------------------------------------------------------------------------------------------


class Renamed:
    """The family of norms, for an operator of another name."""

    name, static_program = FAMILY.name, FAMILY.static_program

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def check(self, request):
        FAMILY.check(request._replace(operator=self.operator))

    def static(self, request):
        return FAMILY.static(request._replace(operator=self.operator))

    def case(self, request):
        return FAMILY.case(request._replace(operator=self.operator))

    def specialise(self, request, limits, config=None):
        return FAMILY.specialise(request._replace(operator=self.operator), limits, config)


@contextlib.contextmanager
def configured(operator: str, config: RowDivision) -> Iterator[None]:
    """Have an operator divide its rows by one configuration."""
    made = Operator(declaration_of(operator), config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(getattr(transformer_rtc, operator).__globals__, f"_{operator}", made.call)
        yield


def few(architecture: int, rule: LaunchRule) -> int:
    """Return the fewest multiprocessors that hold a row's CTAs together."""
    # A kernel's static shared memory is some hundred bytes.
    held = SimulatedDevice(architecture).max_active_ctas(rule.threads, rule.dynamic_shared_memory + 1024)
    return -(-rule.ctas_per_row // held)
