# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of public names: each name has one, and it runs as it is written, on the CPU."""

from __future__ import annotations

import doc_examples
import kernel_cache
import pytest

import transformer_rtc
from transformer_rtc import manager, using

DOCSTRINGS = doc_examples.docstrings(transformer_rtc)


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_a_public_name_has_examples_that_run(name, monkeypatch):
    monkeypatch.setattr(manager, "cache", kernel_cache.disk_cache())
    monkeypatch.setattr(manager, "_freezes", 0)  # an example that fails may leave it frozen
    with using("simulator"):
        wrong = doc_examples.failures(name, DOCSTRINGS[name])
    assert wrong == "", wrong


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("It adds.", "has no section of examples"),
        ("It adds.\n\nExamples\n--------\n>>> 1 + 1\n2\n", "do not use it"),
        ("It adds.\n\nExamples\n--------\n>>> sum([1, 1])  # doctest: +SKIP\n3\n", "are not all run"),
        ("It adds.\n\nExamples\n--------\n>>> sum([1, 1])\n3\n", "Expected:\n    3\nGot:\n    2\n"),
        ("It adds.\n\nExamples\n--------\n>>> sum(1)\n", "TypeError"),
        ("It adds.\n\nExamples\n--------\n>>> sum([1, 1])\n2\n", ""),
    ],
)
def test_an_example_that_is_missing_or_wrong_is_told(text, what):
    found = doc_examples.failures("sum", text)
    assert what in found if what else found == ""
