# SPDX-License-Identifier: Apache-2.0
"""What tools see of the public interface: its names, and what type checkers make of a user's file."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil

import pytest
import typed_calls

import transformer_rtc
from transformer_rtc.declaration import declarations


def test_dir_has_the_public_names_alone():
    assert dir(transformer_rtc) == sorted([*transformer_rtc.__all__, "torch"])
    assert len(set(transformer_rtc.__all__)) == len(transformer_rtc.__all__)
    for name in transformer_rtc.__all__:
        assert getattr(transformer_rtc, name) is not None


def test_no_module_has_the_name_of_a_public_object():
    modules = {module.name for module in pkgutil.iter_modules(transformer_rtc.__path__)}
    assert modules & {*dir(transformer_rtc)} == {"torch"}
    assert isinstance(transformer_rtc.manager, transformer_rtc.KernelManager)
    assert importlib.util.find_spec("transformer_rtc.manager") is None


def test_the_users_file_calls_every_public_function():
    objects = {name: getattr(transformer_rtc, name) for name in transformer_rtc.__all__}
    functions = {name for name, value in objects.items() if inspect.isroutine(value)}
    assert functions == {*declarations(), *typed_calls.OTHERS}


@pytest.mark.thorough
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_knows_what_each_call_returns(checker, tmp_path):
    pytest.importorskip(checker, reason=f"{checker} is not installed")
    text = typed_calls.user_file("NDArray[np.float32]", "import numpy as np\nfrom numpy.typing import NDArray")
    assert getattr(typed_calls, f"errors_of_{checker}")(text, tmp_path) == ""
