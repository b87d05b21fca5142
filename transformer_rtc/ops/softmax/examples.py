# SPDX-License-Identifier: Apache-2.0
"""The examples of the documentation of softmax."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

# By the operators' names.
EXAMPLES = {
    "softmax": """\
>>> x = np.log(np.array([[1, 2, 5]], np.float32))
>>> y, lse = softmax(x, return_lse=True)
>>> np.round(y, 3), np.round(np.exp(lse), 3)
(array([[0.125, 0.25 , 0.625]], dtype=float32), array([8.], dtype=float32))
>>> softmax(np.zeros((1, 2, 2), np.float32), causal="upper_triangular")  # the first query sees one key
array([[[1. , 0. ],
        [0.5, 0.5]]], dtype=float32)
""",
    "log_softmax": """\
>>> y = log_softmax(np.log(np.array([[1, 2, 5]], np.float32)))
>>> np.round(np.exp(y), 3)
array([[0.125, 0.25 , 0.625]], dtype=float32)
""",
    "softmax_backward": """\
>>> y = np.array([[0.25, 0.75]], np.float32)
>>> dy = np.array([[4, 0]], np.float32)  # sum(dy * y) is 1
>>> softmax_backward(dy, y)
array([[ 0.75, -0.75]], dtype=float32)
""",
    "log_softmax_backward": """\
>>> y = np.log(np.array([[0.25, 0.75]], np.float32))
>>> dy = np.array([[4, 0]], np.float32)
>>> np.round(log_softmax_backward(dy, y), 3)
array([[ 3., -3.]], dtype=float32)
""",
}
