# SPDX-License-Identifier: Apache-2.0
"""A Vec's elements of a range: what loads and stores them, beside numpy, for every range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_cache
import numpy as np

from transformer_rtc import Field, LaunchConfig, SimulatedDevice

# Of 1, 2 and 4 bytes.
TYPES = {"trtc::boolean": np.uint8, "trtc::bfloat16": np.uint16, "float": np.uint32}
SIZES = (1, 2, 4, 8)
RESULTS = ("loaded", "stored")
FIELDS = (Field("from", "pointer"), *(Field(name, "pointer") for name in RESULTS), Field("span", "int32"))

# A thread has a range. What it stores by elements has one of them on either side, and no alignment.
TEXT = """#include "vector.cuh"

TRTC_ENTRY void vec_elements(TRTC_PARAMETER Params params) {
  using namespace trtc;
  using Element = ELEMENT;
  using Value = Vec<Element, SIZE>;
  const int thread = static_cast<int>(cta_index() * 64 + thread_index());
  if (thread >= params.span * params.span) return;
  const int first = thread / params.span - SIZE - 1, end = thread % params.span - SIZE - 1;
  const auto* from = static_cast<const Element*>(params.from);  // which is not aligned
  Value loaded, whole;
  loaded.fill(FILL);
  loaded.load_each(from, first, end);
  loaded.store(static_cast<Element*>(params.loaded) + thread * SIZE, true);
  whole.fill(0);
  whole.load_each(from, 0, SIZE);
  whole.store_each(static_cast<Element*>(params.stored) + thread * (SIZE + 2) + 1, first, end);
}
"""


def _pointer(array: Any) -> Any:
    """Return what a launch takes: an array of the host as it is, and of torch its address."""
    return array.data_ptr() if hasattr(array, "data_ptr") else array


def hold(
    element: str, size: int, device: int | SimulatedDevice, rng: np.random.Generator, put: Callable[[np.ndarray], Any]
) -> None:
    """Run every range on a device, to which `put` brings an array as bytes, and compare the results."""
    dtype, fill, poison = TYPES[element], 0x5A, 0xEE
    span = 3 * size + 3  # ranges that begin before the Vec, and end behind it, by more than it has
    # No element is the fill or the poison: their lowest bytes are smaller.
    high, low = (rng.integers(0, end, size + 1, np.uint64) for end in (1 << 32, fill))
    given = (high << 8 | low).astype(dtype)
    text = TEXT.replace("ELEMENT", element).replace("SIZE", str(size)).replace("FILL", f"0x{fill:x}u")
    kernel = kernel_cache.manager().compile(text, "vec_elements", FIELDS, device)
    shapes = {name: (span, span, size + 2 if name == "stored" else size) for name in RESULTS}
    arrays = {name: put(np.full(shape, poison, dtype)) for name, shape in shapes.items()}
    config = LaunchConfig((-(-span * span // 64), 1, 1), (64, 1, 1))
    source = put(given)[dtype().itemsize :]
    pointers = {name: _pointer(array) for name, array in {"from": source, **arrays}.items()}
    kernel.launch(config, {**pointers, "span": span})
    found = {name: np.asarray(array.cpu() if hasattr(array, "cpu") else array) for name, array in arrays.items()}

    ranges = np.arange(span) - size - 1
    places = np.arange(size)
    inside = (places >= ranges[:, None, None]) & (places < ranges[None, :, None])
    whole = given[1:]
    stored = np.full(shapes["stored"], poison, dtype)
    stored[..., 1:-1] = np.where(inside, whole, stored[..., 1:-1])
    expected = {
        "loaded": np.where(inside, whole, dtype(fill)),
        "stored": stored,
    }
    for name in RESULTS:
        np.testing.assert_array_equal(found[name].view(dtype), expected[name], err_msg=name)
