"""Every argument of every public function refuses what the table says, by its name, and before anything is launched."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from bad_values import (
    BASES,
    DEVICE,
    FIELDS,
    FUNCTIONS,
    OTHERS,
    OWN,
    RESULTS,
    SHAPE,
    TEXT,
    TOLD,
    WITH,
    good,
    parameters_of,
    refused_by,
)

import transformer_rtc
from transformer_rtc import Kernel, KernelManager, SimulatedDevice, dispatch, packs, using
from transformer_rtc.cache import DiskCache
from transformer_rtc.errors import ArgumentError, shown


def hold_refused(call: Callable[[], object], name: str, argument: str, value: object) -> None:
    try:
        call()
    except ArgumentError as error:
        told = str(error)
    except Exception as error:
        raise AssertionError(f"{name}: {argument} of {shown(value)}: {error!r}") from error
    else:
        raise AssertionError(f"{name}: {argument} of {shown(value)} was accepted")
    assert re.search(rf"\b({argument})\b", told), f"{name}: {argument} of {shown(value)}: {told}"
    assert len(told) < 1200


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name in FUNCTIONS for one in parameters_of(name)])
def test_an_operator_refuses_by_its_name(name, argument, no_launch):
    first = next(iter(parameters_of(name)))
    for value in refused_by(name, argument):
        given = {**good(name), **WITH.get(argument, {}), argument: value}
        if argument == first and not isinstance(value, np.ndarray):
            given = dict.fromkeys(good(name), value)  # of the same framework
        given = {one: of for one, of in given.items() if one in parameters_of(name)}
        hold_refused(lambda given=given: FUNCTIONS[name](**given), name, argument, value)
        # Without rows, too.
        if not isinstance(value, np.ndarray) and argument != first:
            empty = {
                one: np.zeros((0, *SHAPE[1:]), np.float32) if of is not value and isinstance(of, np.ndarray) else of
                for one, of in given.items()
            }
            hold_refused(lambda given=empty: FUNCTIONS[name](**given), name, argument, value)


@pytest.fixture
def no_launch(monkeypatch) -> Iterator[None]:
    """Run operators where a plan, which a launch needs, is a failure."""

    def plan(self, *_: object) -> Any:
        pytest.fail("it was accepted")

    monkeypatch.setattr(dispatch.Operator, "_native_plan", plan)
    monkeypatch.setattr(dispatch, "manager", None)
    with using(DEVICE):
        yield


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Kernel:
    manager = KernelManager(DiskCache(str(tmp_path_factory.mktemp("kernels"))))
    return manager.compile(TEXT, "store", FIELDS, SimulatedDevice())


def call_of(name: str, kernel: Kernel) -> Callable[..., object]:
    owner, _, method = name.rpartition(".")
    if owner == "Kernel":
        return getattr(kernel, method)
    if owner == "KernelManager":
        return getattr(KernelManager(DiskCache(None)), method)
    if name in ("pack", "unpack"):
        return getattr(packs, name)
    found = getattr(transformer_rtc, name)
    if name in ("using", "record"):

        def entered(**given: Any) -> None:
            with found(**given):
                pass

        return entered
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_a_function_refuses_by_its_name(name, kernel, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    call = call_of(name, kernel)
    base, refused = OTHERS[name]
    for argument, values in refused.items():
        for value in values:
            given = {**base, **value} if argument == "arguments" else {**base, argument: value}
            if "Kernel.launch" in name and argument != "params":
                given = {"params": {"out": 0, "value": 1}, **given}
            told = "|".join(value) if argument == "arguments" else TOLD.get(argument, argument)
            hold_refused(lambda given=given: call(**given), name, told, value)
    assert not any(tmp_path.iterdir())


def test_no_argument_of_a_public_function_is_missing_from_the_table():
    errors = set(transformer_rtc.errors.__all__)
    others = set(transformer_rtc.__all__) - FUNCTIONS.keys() - errors - RESULTS - BASES - {"__version__", "manager"}
    assert others == {name for name in OTHERS if "." not in name} - {"pack", "unpack"}
    for owner in (KernelManager, Kernel):
        methods = {
            f"{owner.__name__}.{name}"
            for name, found in inspect.getmembers(owner, inspect.isfunction)
            if not name.startswith("_")
        }
        assert methods - OWN == {name for name in OTHERS if name.startswith(f"{owner.__name__}.")}
    for name in FUNCTIONS:
        assert all(refused_by(name, argument) for argument in parameters_of(name))
    for name, (_, refused) in OTHERS.items():
        owner, _, method = name.rpartition(".")
        found = getattr(getattr(transformer_rtc, owner), method) if owner else getattr(transformer_rtc, name, None)
        parameters = set(inspect.signature(found or getattr(packs, name)).parameters) - {"self"}
        assert parameters == refused.keys(), name


def test_what_is_shown_of_a_value_is_short():
    assert shown(-(10**5000)) == "a int"
    assert len(shown("x" * 1000)) < 210 and shown("x") == "'x'"
