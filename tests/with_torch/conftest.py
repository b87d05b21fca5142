# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def torch() -> ModuleType:
    return importlib.import_module("torch")
