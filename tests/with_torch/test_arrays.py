# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from transformer_rtc import _native
from transformer_rtc.arrays import dtype_id
from transformer_rtc.arrays.dtypes import storage_dtype
from transformer_rtc.arrays.torch import Torch
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import DTYPES


def test_data_types_are_known(torch):
    for dtype in DTYPES.values():
        assert dtype_id(getattr(torch, dtype.name)) == dtype.id
    with pytest.raises(ArgumentError, match="float64"):
        dtype_id(torch.float64)


def test_a_dlpack_capsule_is_read(torch):
    for dtype in DTYPES.values():
        x = torch.zeros(4, 6, 8, dtype=getattr(torch, dtype.name))[::2, 1:, 3:]
        for options in ({}, {"max_version": (1, 0)}):
            found = _native.read_dlpack(x.__dlpack__(**options))
            assert found == (x.data_ptr(), tuple(x.shape), x.stride(), dtype.id, 1, 0, False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_host_results_become_tensors(dtype, torch, rng):
    bits = rng.integers(0, 2 ** (8 * dtype.bytes), (3, 5), np.uint64).astype(f"u{dtype.bytes}")
    tensor = Torch({}).from_host(bits.view(storage_dtype(dtype.id)), dtype.id)
    assert tensor.dtype == getattr(torch, dtype.name)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.bytes]
    np.testing.assert_array_equal(tensor.view(signed).numpy().view(bits.dtype), bits)
