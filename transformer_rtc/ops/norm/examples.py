# SPDX-License-Identifier: Apache-2.0
"""The examples of the norms' documentation, of rows whose results have few digits."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

_RMS_NORM_BACKWARD = """\
>>> x = np.array([[4, 1, 1, 1, 1]], np.float32)  # x * rstd is [2, 0.5, 0.5, 0.5, 0.5]
>>> dy = np.array([[0, 5, 0, 0, 0]], np.float32)
>>> dx, dweight = {name}(dy, x, np.ones(5, np.float32), eps=0.0)
>>> dx
array([[-0.5  ,  2.375, -0.125, -0.125, -0.125]], dtype=float32)
>>> dweight
array([0. , 2.5, 0. , 0. , 0. ], dtype=float32)
"""
_LAYER_NORM_BACKWARD = """\
>>> x = np.array([[6, 1, 1, 1, 1]], np.float32)  # (x - mean) * rstd is [2, -0.5, -0.5, -0.5, -0.5]
>>> dy = np.array([[0, 5, 0, 0, 0]], np.float32)
>>> dx, dweight, dbias = {name}(dy, x, np.ones(5, np.float32), eps=0.0)
>>> dx
array([[ 0.   ,  1.875, -0.625, -0.625, -0.625]], dtype=float32)
>>> dweight
array([ 0. , -2.5,  0. ,  0. ,  0. ], dtype=float32)
>>> dbias
array([0., 5., 0., 0., 0.], dtype=float32)
"""

# By the operators' names.
EXAMPLES = {
    "rms_norm": """\
>>> x = np.array([[4, 1, 1, 1, 1]], np.float32)  # the mean of its squares is 4
>>> weight = np.array([1, 1, 1, 1, 10], np.float32)
>>> rms_norm(x, weight, eps=0.0, return_rstd=True)
(array([[2. , 0.5, 0.5, 0.5, 5. ]], dtype=float32), array([0.5], dtype=float32))
""",
    "layer_norm": """\
>>> x = np.array([[6, 1, 1, 1, 1]], np.float32)  # the mean is 2, and the variance 4
>>> weight, bias = np.full(5, 2, np.float32), np.ones(5, np.float32)
>>> y, mean, rstd = layer_norm(x, weight, bias, eps=0.0, return_mean=True, return_rstd=True)
>>> y
array([[5., 0., 0., 0., 0.]], dtype=float32)
>>> mean, rstd
(array([2.], dtype=float32), array([0.5], dtype=float32))
""",
    "add_rms_norm": """\
>>> x, residual = np.array([[3, 0, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
>>> y, s = add_rms_norm(x, residual, eps=0.0)
>>> s  # the next residual: the mean of its squares is 4
array([[4., 1., 1., 1., 1.]], dtype=float32)
>>> y
array([[2. , 0.5, 0.5, 0.5, 0.5]], dtype=float32)
""",
    "add_layer_norm": """\
>>> x, residual = np.array([[5, 0, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
>>> y, s = add_layer_norm(x, residual, eps=0.0)
>>> s  # the next residual: its mean is 2, and its variance 4
array([[6., 1., 1., 1., 1.]], dtype=float32)
>>> y
array([[ 2. , -0.5, -0.5, -0.5, -0.5]], dtype=float32)
""",
    "rms_norm_add": """\
>>> x, residual = np.array([[4, 1, 1, 1, 1]], np.float32), np.full((1, 5), 10, np.float32)
>>> rms_norm_add(x, residual, eps=0.0)  # the mean of x's squares is 4
array([[12. , 10.5, 10.5, 10.5, 10.5]], dtype=float32)
""",
    "layer_norm_add": """\
>>> x, residual = np.array([[6, 1, 1, 1, 1]], np.float32), np.full((1, 5), 10, np.float32)
>>> layer_norm_add(x, residual, eps=0.0)  # x's mean is 2, and its variance 4
array([[12. ,  9.5,  9.5,  9.5,  9.5]], dtype=float32)
""",
    "rms_norm_backward": _RMS_NORM_BACKWARD.format(name="rms_norm_backward"),
    "layer_norm_backward": _LAYER_NORM_BACKWARD.format(name="layer_norm_backward"),
    "add_rms_norm_backward": """\
>>> s = np.array([[4, 1, 1, 1, 1]], np.float32)  # s * rstd is [2, 0.5, 0.5, 0.5, 0.5]
>>> dy, ds = np.array([[0, 5, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
>>> dx, dweight = add_rms_norm_backward(dy, ds, s, np.ones(5, np.float32), eps=0.0)
>>> dx  # that of rms_norm_backward, and ds
array([[0.5  , 3.375, 0.875, 0.875, 0.875]], dtype=float32)
>>> dweight
array([0. , 2.5, 0. , 0. , 0. ], dtype=float32)
""",
    "add_layer_norm_backward": """\
>>> s = np.array([[6, 1, 1, 1, 1]], np.float32)  # (s - mean) * rstd is [2, -0.5, -0.5, -0.5, -0.5]
>>> dy, ds = np.array([[0, 5, 0, 0, 0]], np.float32), np.ones((1, 5), np.float32)
>>> dx, dweight, dbias = add_layer_norm_backward(dy, ds, s, np.ones(5, np.float32), eps=0.0)
>>> dx  # that of layer_norm_backward, and ds
array([[1.   , 2.875, 0.375, 0.375, 0.375]], dtype=float32)
>>> dweight
array([ 0. , -2.5,  0. ,  0. ,  0. ], dtype=float32)
>>> dbias
array([0., 5., 0., 0., 0.], dtype=float32)
""",
    "rms_norm_add_backward": _RMS_NORM_BACKWARD.format(name="rms_norm_add_backward"),
    "layer_norm_add_backward": _LAYER_NORM_BACKWARD.format(name="layer_norm_add_backward"),
}
