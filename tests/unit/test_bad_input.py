# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public function refuses what the table says, by its name, and before anything is launched."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import bad_values
import numpy as np
import pytest
from bad_values import FUNCTIONS, OTHERS, SHAPE, Stub, parameters_of
from native_calls import BASE, required_views

import transformer_rtc
from transformer_rtc import Kernel, KernelManager, SimulatedDevice, archive
from transformer_rtc.arguments import Stream
from transformer_rtc.cache import DiskCache
from transformer_rtc.declaration import declaration_of, operator_names
from transformer_rtc.errors import ArgumentError, shown


def hold_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}") as raised:
        call()
    assert len(str(raised.value)) < 1200


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (name, one.name)
        for name in operator_names()
        for one in declaration_of(name).arguments
        if not isinstance(one, Stream)
    ],
)
def test_an_operator_refuses_a_view_by_its_name(operator, name, check):
    first = declaration_of(operator).arguments[0].name
    check(operator=operator, **required_views(operator, SHAPE))
    refused = bad_values.refused_views(operator, name)
    assert refused
    for value, message in refused:
        like = value.shape if name == first else SHAPE  # the first one says what shape the others must have
        of = value.view(BASE << 20) if isinstance(value, Stub) else value
        given = {**required_views(operator, like), **({"causal": "aligned"} if name == "window" else {}), name: of}
        hold_refused(lambda given=given: check(operator=operator, **given), f"{operator}: {message}")


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name in FUNCTIONS for one in parameters_of(name)])
def test_a_function_of_arrays_refuses_by_its_name(name, argument, no_launch):
    first = next(iter(parameters_of(name)))
    refused = bad_values.refused_values(name, argument)
    assert refused
    for value, message in refused:
        given = {**bad_values.good(name), argument: value}
        if argument == first:  # which says of what framework and shape the others must be
            is_array = isinstance(value, np.ndarray)
            others = bad_values.good(name, value.shape) if is_array else dict.fromkeys(bad_values.good(name), value)
            given = {**others, first: value}
        if argument == "window":
            given["causal"] = "aligned"
        hold_refused(lambda given=given: FUNCTIONS[name](**given), f"{name}: {message}")
        # Without rows, too.
        if not isinstance(value, np.ndarray) and argument != first:
            rows = [one for one, of in given.items() if getattr(of, "shape", None) == SHAPE and of is not value]
            empty = {one: of[:0] if one in rows else of for one, of in given.items()}
            hold_refused(lambda given=empty: FUNCTIONS[name](**given), f"{name}: {message}")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Kernel:
    manager = KernelManager(DiskCache(str(tmp_path_factory.mktemp("kernels"))))
    return manager.compile(bad_values.TEXT, "store", bad_values.FIELDS, SimulatedDevice())


def call_of(name: str, kernel: Kernel) -> Callable[..., object]:
    owner, _, method = name.rpartition(".")
    of = {"Kernel": kernel, "KernelManager": KernelManager(DiskCache(None)), "": transformer_rtc}[owner]
    found = getattr(archive if name in ("pack", "unpack") else of, method)
    if name not in ("using", "record"):
        return found
    return lambda **given: contextlib.ExitStack().enter_context(found(**given))


@pytest.mark.parametrize("name", OTHERS)
def test_another_function_refuses_by_its_name(name, kernel, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    call = call_of(name, kernel)
    base, refused = OTHERS[name]
    for argument, rows in refused.items():
        for message, *values in rows:
            for value in values:
                given = {**base, **value} if argument == "arguments" else {**base, argument: value}
                if "Kernel.launch" in name and argument != "params":
                    given = {"params": {"out": 0, "value": 1}, **given}
                hold_refused(lambda given=given: call(**given), bad_values.filled(message, value, argument))
    assert not any(tmp_path.iterdir())


def test_no_argument_of_a_public_function_is_missing_from_the_table():
    others = set(transformer_rtc.__all__) - FUNCTIONS.keys() - bad_values.NOT_CALLED
    assert others == {name for name in OTHERS if "." not in name} - {"pack", "unpack"}
    for owner in (KernelManager, Kernel):
        methods = {f"{owner.__name__}.{name}" for name, _ in inspect.getmembers(owner, inspect.isfunction)}
        public = {name for name in methods if "._" not in name} - bad_values.OWN
        assert public == {name for name in OTHERS if name.startswith(f"{owner.__name__}.")}
    for name, (_, refused) in OTHERS.items():
        owner, _, method = name.rpartition(".")
        found = getattr(getattr(transformer_rtc, owner), method) if owner else getattr(transformer_rtc, name, None)
        parameters = set(inspect.signature(found or getattr(archive, name)).parameters) - {"self"}
        assert parameters == refused.keys(), name


def test_what_is_shown_of_a_value_is_short():
    nested: list[object] = []
    for _ in range(10**5):  # deeper than repr goes
        nested = [nested]
    assert (shown(-(10**5000)), shown(nested)) == ("a int", "a list")
    assert len(shown("x" * 1000)) < 210 and shown("x") == "'x'"
