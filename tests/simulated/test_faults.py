# SPDX-License-Identifier: Apache-2.0
"""Checked mode reports each seeded fault where it is, and nothing of the right kernels that they were made from.

Tier 1 runs each right kernel once, and of each the first fault of every kind of report and the first change of the
launch, in one order of threads. The thorough tests are the other faults, and the other orders of the same modules.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator

import faults
import faults_between_ctas
import faults_in_ctas
import pytest

from transformer_rtc import SimulationError
from transformer_rtc.simulator.device import ORDERS

SUBJECTS = {**faults_in_ctas.SUBJECTS, **faults_between_ctas.SUBJECTS}
FAULTS = [fault for name, subject in SUBJECTS.items() for fault in faults.faults_of(name, subject)]
BY_NAME = {fault.name: fault for fault in FAULTS}
OF_TIER_1 = {
    (fault.of, fault.kinds[0], fault.subject is SUBJECTS[fault.of]): fault
    for fault in reversed(FAULTS)
    if not fault.missed
}.values()
IN_EACH_ORDER = pytest.mark.parametrize(
    "order", [ORDERS[0], *(pytest.param(order, marks=pytest.mark.thorough) for order in ORDERS[1:])]
)


def launch(name: str, order: str) -> None:
    """Launch a right kernel, and check what it writes."""
    subject = SUBJECTS[name]
    values = subject.values()
    faults.manager().get(subject.spec, faults.device(order)).launch(subject.config, values)
    subject.check(values)


def in_orders() -> Iterator[object]:
    """Yield each fault in each order that shows it."""
    for fault in FAULTS:
        for order in fault.orders:
            marks = [] if fault in OF_TIER_1 and order == fault.orders[0] else [pytest.mark.thorough]
            if fault.missed:
                marks.append(pytest.mark.xfail(strict=True, reason=fault.missed))
            yield pytest.param(fault, order, marks=marks, id=re.sub(r"\W+", "_", fault.name) + f"-{order}")


@IN_EACH_ORDER
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_right_kernel_runs_without_a_report(name, order):
    launch(name, order)


@pytest.mark.parametrize(("fault", "order"), list(in_orders()))
def test_a_fault_is_reported_where_it_is(fault, order):
    _, lines = fault.made
    error = fault.report(order)
    assert error is not None, "no report"
    assert error.kind in fault.kinds, error
    for frames in (error.frames, error.other_frames):
        places = {(file, line) for _, file, line in frames}
        assert not lines or not places or places & lines, f"{error}\nis at none of {lines}"
    assert not lines or error.frames or error.other_frames, f"{error}\nis nowhere"


def test_almost_every_fault_is_reported_and_every_race():
    # That the others are reported, and that these are not, is what their tests say.
    missed = [fault for fault in FAULTS if fault.missed]
    assert len(missed) <= 0.05 * len(FAULTS)
    # By CUDA's memory model, volatile accesses do not race.
    assert [fault.name for fault in missed if "race" in fault.kinds] == ["a warp's reduction that trusts in volatile"]
    assert len(BY_NAME) == len(FAULTS) >= 75
    assert sum("race" in fault.kinds for fault in FAULTS) >= 32


def test_every_kind_of_report_has_a_fault():
    # A signal is what the simulator did not see coming.
    kinds = set(re.findall(r'``"(\w+)"``', SimulationError.__doc__ or "")) - {"signal"}
    assert {fault.kinds[0] for fault in OF_TIER_1 if len(fault.kinds) == 1} == kinds


@IN_EACH_ORDER
@pytest.mark.parametrize(
    "name",
    [
        "no barrier between the steps of a reduction",
        "a barrier in a branch",
        "a flag that nobody sets",
        "CTAs write one element",
        "one element past the end",
    ],
)
def test_a_fault_takes_less_than_a_second_and_does_no_harm(name, order):
    fault = BY_NAME[name]
    fault.report(order)  # compiled and loaded
    for _ in range(3):
        start = sum(os.times()[:4])
        error = fault.report(order)
        assert sum(os.times()[:4]) - start < 1.0  # of this process and of those that say where it was
        assert error is not None and error.kind in fault.kinds
        # Neither is anything left of the launch that failed, nor is the kernel itself of no more use.
        launch(fault.of, order)


def test_a_report_names_both_parties_and_survives_a_pickle():
    fault = BY_NAME["CTAs write one element"]
    (line,) = fault.made[1]
    error = fault.report("first_in")
    assert (error.kernel, error.kind, (error.file, error.line)) == ("kernel", "race", line)
    assert (error.block, error.thread) == ((1, 0, 0), (0, 0, 0))
    assert (error.other_block, error.other_thread) == ((0, 0, 0), (0, 0, 0))
    assert error.other_frames == error.frames == [("kernel", *line)]
    assert "out" in error.what
    for part in ("kernel: race", error.what, "block (1, 0, 0) thread (0, 0, 0)", "block (0, 0, 0) thread (0, 0, 0)"):
        assert part in str(error)
    assert str(error).count(f"{line[0]}:{line[1]}") == 2

    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is SimulationError
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_a_report_in_a_header_says_who_called_it():
    fault = BY_NAME["sums of warps are read without a barrier"]
    error = fault.report("first_in")
    assert (error.file, error.line) in fault.made[1]
    assert [file for _, file, _ in error.frames][-2:] == ["forward_registers.cu", f"{SUBJECTS['norm'].spec.symbol}.cu"]
    assert ", called from forward_registers.cu:" in str(error)
