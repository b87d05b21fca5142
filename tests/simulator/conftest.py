from __future__ import annotations

from collections.abc import Iterator

import pytest

from transformer_rtc import KernelManager, dispatch
from transformer_rtc.cache import DiskCache


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def kernels(kernel_folder: str) -> Iterator[KernelManager]:
    """Give the operators a manager with a cache of the tests' own: images are shared by every order and every test."""
    made = KernelManager(DiskCache(kernel_folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "manager", made)
        yield made
