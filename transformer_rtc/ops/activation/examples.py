# SPDX-License-Identifier: Apache-2.0
"""The examples of the activations' documentation."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

# By the operators' names.
EXAMPLES = {
    "gelu": """\
>>> x = np.array([[-1, 0, 1]], np.float32)
>>> np.round(gelu(x), 4)
array([[-0.1587,  0.    ,  0.8413]], dtype=float32)
""",
    "silu": """\
>>> x = np.array([[-1, 0, 1]], np.float32)
>>> np.round(silu(x), 4)
array([[-0.2689,  0.    ,  0.7311]], dtype=float32)
""",
    "relu_squared": """\
>>> relu_squared(np.array([[-2, 0, 3]], np.float32))
array([[0., 0., 9.]], dtype=float32)
""",
    "gelu_and_mul": """\
>>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
>>> np.round(gelu_and_mul(x, up), 3)
array([[0.   , 8.413]], dtype=float32)
>>> np.round(gelu_and_mul(np.concatenate([x, up], axis=-1)), 3)  # of the halves of each row
array([[0.   , 8.413]], dtype=float32)
""",
    "silu_and_mul": """\
>>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
>>> np.round(silu_and_mul(x, up), 3)
array([[0.   , 7.311]], dtype=float32)
>>> np.round(silu_and_mul(np.concatenate([x, up], axis=-1)), 3)  # of the halves of each row
array([[0.   , 7.311]], dtype=float32)
""",
    "gelu_backward": """\
>>> x = np.array([[0, 1]], np.float32)
>>> np.round(gelu_backward(np.ones_like(x), x), 4)
array([[0.5   , 1.0833]], dtype=float32)
""",
    "silu_backward": """\
>>> x = np.array([[0, 1]], np.float32)
>>> np.round(silu_backward(np.ones_like(x), x), 4)
array([[0.5   , 0.9277]], dtype=float32)
""",
    "relu_squared_backward": """\
>>> x = np.array([[-2, 0, 3]], np.float32)
>>> relu_squared_backward(np.ones_like(x), x)
array([[0., 0., 6.]], dtype=float32)
""",
    "gelu_and_mul_backward": """\
>>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
>>> dx, dup = gelu_and_mul_backward(np.ones_like(x), x, up)
>>> np.round(dx, 3)
array([[ 2.5  , 10.833]], dtype=float32)
>>> np.round(dup, 4)
array([[0.    , 0.8413]], dtype=float32)
""",
    "silu_and_mul_backward": """\
>>> x, up = np.array([[0, 1]], np.float32), np.array([[5, 10]], np.float32)
>>> dx, dup = silu_and_mul_backward(np.ones_like(x), x, up)
>>> np.round(dx, 3)
array([[2.5  , 9.277]], dtype=float32)
>>> np.round(dup, 4)
array([[0.    , 0.7311]], dtype=float32)
""",
}
