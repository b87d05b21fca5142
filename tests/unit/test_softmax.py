# SPDX-License-Identifier: Apache-2.0
"""What softmax refuses, by name and before anything is launched, and how its functions pass their arguments on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import transformer_rtc
from transformer_rtc import SimulatedDevice, operator, softmax, using
from transformer_rtc.errors import ArgumentError

NAMES = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
X, Y = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 3, 2, 4, 8), np.float32)


@pytest.fixture(autouse=True)
def simulator(monkeypatch) -> Iterator[None]:
    """Take arrays of the host, and have no kernel for them."""
    monkeypatch.setattr(operator, "manager", None)
    with using(SimulatedDevice()):
        yield


def zeros(*shape: int, dtype: type = bool) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_a_mask_that_is_overwritten_is_refused():
    out = np.zeros_like(X)
    with pytest.raises(ArgumentError, match=r"^softmax: out must not overlap mask"):
        softmax(X, out=out, mask=out.view(np.uint8).reshape(2, 3, 4, 32)[..., :8])


# A mask whose batches of several dimensions have no one stride: the message says what it is to be expanded to.
COLLAPSE = "mask must have dimensions before the heads that collapse.*"


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (Y, zeros(2, 1, 2, 4, 8), COLLAPSE),
        (zeros(2, 5, 3, 4, 8, dtype=np.float32), zeros(2, 1, 1, 4, 8), rf"{COLLAPSE}array of \(2, 5, 1, 4, 8\)$"),
        (zeros(2, 5, 3, 4, 8, dtype=np.float32), zeros(5, 1, 1, 8), r".*array of \(2, 5, 1, 1, 8\)$"),
    ],
)
def test_a_mask_of_some_batches_is_to_be_expanded_along_these_alone(x, mask, message):
    with pytest.raises(ArgumentError, match=f"^softmax: {message}"):
        softmax(x, mask=mask)


REFUSED = (
    ({"mask": zeros(4, 8, dtype=np.uint8)}, "only a mask of floats has a gradient; mask is uint8"),
    ({"mask": zeros(4, 8), "return_dmask": False}, "only a mask of floats has a gradient; mask is bool"),
    ({"sink": zeros(3, dtype=np.float32)}, "return_dsink needs sink and lse; lse is None"),
)


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_has_no_gradient_is_refused_by_name(name, given, message):
    for rows in (slice(0, 2), slice(0, 0)):  # without rows, too
        with pytest.raises(ArgumentError, match=f"^{name}: {message}"):
            getattr(transformer_rtc, name)(X[rows], X[rows], **given)


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_gradient_of_batches_of_which_some_are_broadcast_is_refused(name):
    # They have no one stride, though the mask's own are 0.
    mask = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2, 1, 2, 4, 8), (0, 0, 0, 0, 4))
    with pytest.raises(ArgumentError, match=f"^{name}: {COLLAPSE}"):
        getattr(transformer_rtc, name)(Y, Y, mask=mask)
