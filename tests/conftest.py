from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from transformer_rtc import _native, arrays, dispatch
from transformer_rtc.errors import DriverNotFoundError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of random data; drawn afresh by default")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    print(f"random data of --seed {seed}")  # pytest shows it where the test fails
    return np.random.default_rng(seed)


@pytest.fixture
def without_driver() -> None:
    """Skip where there is a GPU: what the test expects is what a machine without one says."""
    try:
        _native.driver_version()
    except DriverNotFoundError:
        return
    pytest.skip("this machine has a driver")


class ChecksPassed(Exception):
    """A call got as far as its plan."""


# What the operators' functions in Python give where the user says nothing.
DEFAULTS = {
    "eps": 1e-6, "weight_offset": 0.0, "out_dtype": None, "mean": False, "rstd": False, "row_scale": False,
    "return_dx": True, "dweight": True, "dbias": False, "dweight_dtype": None, "sm_margin": 0, "stream": None,
}  # fmt: skip


@pytest.fixture
def check() -> Callable[..., tuple[object, ...]]:
    """Return a call of an operator on views that stops where a plan is needed: it returns the plan's arguments."""

    def plan(*arguments: object) -> _native.Plan:
        raise ChecksPassed(arguments)

    made: dict[str, _native.Operator] = {}

    def run(x, weight=None, out=None, allocate=pytest.fail, operator="rms_norm", **values):  # type: ignore[no-untyped-def]
        arguments = dispatch.operators()[operator].arguments
        if operator not in made:
            roles = dispatch.native_arguments(arguments)
            made[operator] = _native.Operator(
                operator, roles, plan, lambda *request: 132, pytest.fail, arrays.framework_of, dispatch._chosen
            )
        given = {**DEFAULTS, **values, "x": x, "weight": weight, "out": out}
        names = [argument.name for argument in arguments if argument.role not in dispatch._NO_ARRAYS]
        views = [(given[name], given[name]) if isinstance(given.get(name), _native.View) else None for name in names]
        try:
            return (made[operator].run_views(views, [given.get(a.name) for a in arguments], allocate, 0),)
        except ChecksPassed as passed:
            return passed.args[0]

    return run
