# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import kernel_cache
import pytest

from transformer_rtc import KernelManager, operator


@pytest.fixture(scope="module")
def kernels() -> Iterator[KernelManager]:
    """Give the operators a manager on the folder of kernels that all tests share."""
    made = kernel_cache.manager()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "manager", made)
        yield made
