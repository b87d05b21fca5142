from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from transformer_rtc import _native, arrays, dispatch
from transformer_rtc.errors import DriverNotFoundError
from transformer_rtc.ops import norms


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


@pytest.fixture
def check() -> Callable[..., tuple[object, ...]]:
    """Return a call of rms_norm on views that stops where a plan is needed: it returns the plan's arguments."""

    def plan(*arguments: object) -> _native.Plan:
        raise ChecksPassed(arguments)

    arguments = norms._RMS_NORM.arguments
    roles = [
        (getattr(_native.Role, argument.role.upper()), argument.name, [dtype.id for dtype in argument.dtypes],
         argument.optional)
        for argument in arguments
    ]  # fmt: skip
    native = _native.Operator("rms_norm", roles, plan, pytest.fail, arrays.framework_of, dispatch._chosen)

    def run(x, weight=None, out=None, allocate=pytest.fail, **values):  # type: ignore[no-untyped-def]
        given = {"eps": 1e-6, "weight_offset": 0.0, "out_dtype": None, "rstd": False, "stream": None, **values}
        views = [None if view is None else (view, view) for view in (x, weight, out, None)]
        given |= {"x": x, "weight": weight, "out": out}
        try:
            return (native.run_views(views, [given[argument.name] for argument in arguments], allocate, 0),)
        except ChecksPassed as passed:
            return passed.args[0]

    return run
