# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of `transformer_rtc.torch`: each public name has one, and it runs on the CPU."""

from __future__ import annotations

import importlib.util

import doc_examples
import kernel_cache
import pytest

import transformer_rtc.torch
from transformer_rtc import manager, using

PACKAGE = transformer_rtc.torch
DOCSTRINGS = {
    f"{module.__name__.removeprefix('transformer_rtc.')}.{name}": text
    for module in (PACKAGE, *(getattr(PACKAGE, name) for name in PACKAGE._MODULES))
    for name, text in doc_examples.docstrings(module).items()
}


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_a_public_name_has_examples_that_run(name, monkeypatch):
    if "transformers" in DOCSTRINGS[name] and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    monkeypatch.setattr(manager, "cache", kernel_cache.disk_cache())
    with using("simulator"):
        wrong = doc_examples.failures(name, DOCSTRINGS[name])
    assert wrong == "", wrong
