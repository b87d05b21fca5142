# SPDX-License-Identifier: Apache-2.0
"""What bandwidth.py needs to know of softmax: its arrays, what is expected of it, and how others compute it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import transformer_rtc

SCALE = 0.5
MASKED_SHARE = 0.3
WINDOW = 1024
# (batch, heads, keys) of the masked and causal cases, with as many queries as keys.
MATRICES = ((8, 16, 1024), (2, 16, 2048), (1, 8, 4096), (1, 4, 8192), (1, 4, 16384), (1, 2, 32768))
ALIGNED_QUERIES = 1024  # of which the last one sees the last key

# Kinds of cases of matrices. A mask is [batch, 1, queries, keys], but for that of "own mask", which each head has; of
# floats, it is added. A sink is in causal matrices. Backward, a mask and a sink have gradients.
CAUSAL = ("causal", "aligned", "window", "sink")
ADDED = ("added mask", "own mask")
# The other kinds, by direction, and those of MATRICES that they have.
OTHER_KINDS = {"forward": ("added mask", "window", "sink"), "backward": ("added mask", "own mask", "window", "sink")}
OTHER_MATRICES = tuple(matrix for matrix in MATRICES if matrix[2] in (2048, 8192))


class Given(NamedTuple):
    """Arrays of a call; those that its case does not have are None."""

    x: Any  # or y, of a backward case
    dy: Any
    mask: Any
    sink: Any
    lse: Any

    @property
    def gradients_of(self) -> Any:
        """Return what has a gradient beside x, or None."""
        return self.sink if self.mask is None else self.mask


def read_columns(case: Any) -> int:
    """Return how many columns of a matrix take part in a causal case."""
    most = WINDOW if case.kind == "window" else case.hidden
    return sum(min(most, query + 1 + case.hidden - case.rows) for query in range(case.rows))


def mask_elements(case: Any) -> int:
    batch, heads = case.matrix
    matrices = {"masked": batch, "added mask": batch, "own mask": batch * heads}.get(case.kind, 0)
    return matrices * case.rows * case.hidden


def make(torch: Any, case: Any, normal: Callable[..., Any], device: str) -> Given:
    x = normal(*case.matrix, case.rows, case.hidden)
    mask = sink = lse = None
    if case.kind == "masked":
        mask = torch.rand((case.matrix[0], 1, case.rows, case.hidden), device=device) < MASKED_SHARE
    elif case.kind in ADDED:
        batch, heads = case.matrix
        mask = normal(batch, heads if case.kind == "own mask" else 1, case.rows, case.hidden)
    elif case.kind == "sink":
        sink = normal(case.matrix[1])
    if not case.backward:
        return Given(x, None, mask, sink, None)
    y = torch.empty_like(x)
    if sink is not None:
        lse = torch.empty(x.shape[:-1], dtype=torch.float32, device=device)
    excluded = exclusion(torch, case, device)
    for number in matrices(case):
        # A mask's values do not matter to the gradient: y is without it.
        v = scaled(case, x[number], None, excluded)
        if sink is not None:
            lse[number] = torch.logsumexp(with_sink(torch, v.float(), sink[number[1]]), -1)
        y[number] = normalized(torch, case, v, None if sink is None else sink[number[1]])
    return Given(y, normal(*x.shape), mask, sink, lse)


def matrices(case: Any) -> Iterator[tuple[int, ...]]:
    """Yield the index of each matrix; of a case without matrices, that of all."""
    if not case.matrix:
        yield ()
        return
    batch, heads = case.matrix
    yield from ((one, head) for one in range(batch) for head in range(heads))


def exclusion(torch: Any, case: Any, device: str) -> Any:
    """Return what a causal mode excludes of a matrix, or None."""
    if case.kind not in CAUSAL:
        return None
    queries = torch.arange(case.rows, device=device)[:, None] + (case.hidden - case.rows)
    keys = torch.arange(case.hidden, device=device)[None, :]
    excluded = keys > queries
    return excluded | (keys <= queries - WINDOW) if case.kind == "window" else excluded


def scaled(case: Any, x: Any, mask: Any, excluded: Any) -> Any:
    """Return v of x, of as many rows as the mask, and what a causal mode excludes, have."""
    v = x * SCALE
    if excluded is not None:
        v = v.masked_fill(excluded, float("-inf"))
    if mask is None:
        return v
    return v.masked_fill(mask, float("-inf")) if case.kind == "masked" else v + mask


def with_sink(torch: Any, v: Any, sink: Any) -> Any:
    """Return v and a column more, of a sink that is broadcast to v's leading dimensions."""
    return torch.cat((v, sink.to(v.dtype).expand(*v.shape[:-1], 1)), -1)


def normalized(torch: Any, case: Any, v: Any, sink: Any) -> Any:
    if case.operator.startswith("log_"):
        return torch.log_softmax(v, -1)
    return torch.softmax(v, -1) if sink is None else torch.softmax(with_sink(torch, v, sink), -1)[..., :-1]


def gradient(case: Any, dy: Any, y: Any) -> Any:
    if case.operator.startswith("log_"):
        return dy - y.exp() * dy.sum(-1, keepdim=True)
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def expected(torch: Any, case: Any, some: Any, given: Given, device: str) -> tuple[list[Any], list[Any]]:
    """Return results in float64: of some rows [some, columns] of the flattened rows; and of others, whole."""
    rows = given.x.reshape(-1, case.hidden)[some].double()
    if not case.backward:
        if not case.matrix:
            return [normalized(torch, case, rows * SCALE, None)], []
        found = torch.empty_like(rows)
        excluded = exclusion(torch, case, device)
        for place, row in enumerate(some.tolist()):
            matrix, query = divmod(row, case.rows)
            head = matrix % case.matrix[1]
            mask = None if given.mask is None else given.mask.expand(given.x.shape).flatten(0, 1)[matrix, query]
            v = scaled(case, rows[place], mask, None if excluded is None else excluded[query])
            found[place] = normalized(torch, case, v, None if given.sink is None else given.sink[head])
        return [found], []
    dx = SCALE * gradient(case, given.dy.reshape(-1, case.hidden)[some].double(), rows)
    if given.gradients_of is None:
        return [dx], []
    other = torch.zeros(given.gradients_of.shape, dtype=torch.float64, device=device)
    for batch, head in matrices(case):
        y, dy = given.x[batch, head].double(), given.dy[batch, head].double()
        if given.sink is not None:
            p = torch.exp(given.sink[head].double() - given.lse[batch, head].double())
            other[head] -= (p * (dy * y).sum(-1)).sum()
        else:
            other[batch, head if case.kind == "own mask" else 0] += gradient(case, dy, y)
    return [dx], [other]


def ours(case: Any, given: Given) -> Callable[[], Any]:
    options: dict[str, Any] = {"scale": SCALE}
    if case.kind in CAUSAL:
        options["causal"] = "aligned"
    if case.kind == "window":
        options["window"] = WINDOW
    options |= {name: getattr(given, name) for name in ("mask", "sink", "lse") if getattr(given, name) is not None}
    arrays = (given.dy, given.x) if case.backward else (given.x,)
    return functools.partial(getattr(transformer_rtc, case.operator), *arrays, **options)


def in_torch(torch: Any, case: Any, given: Given, wrap: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a call of the same in torch's operators; `wrap` compiles a function, or leaves it."""
    aten = torch.ops.aten
    if case.backward:
        name = "_log_softmax_backward_data" if case.operator.startswith("log_") else "_softmax_backward_data"

        def backward(dy: Any, y: Any, sink: Any, lse: Any) -> Any:
            found = getattr(aten, name)(dy, y, -1, y.dtype)
            if case.kind == "own mask":
                return found * SCALE, found
            if case.kind == "added mask":
                return found * SCALE, found.sum(1, keepdim=True)
            if case.kind == "sink":
                dsink = -(torch.exp(sink[:, None] - lse) * (dy * y).sum(-1)).sum((0, 2))
                return found * SCALE, dsink.to(sink.dtype)
            return found * SCALE

        return functools.partial(wrap(backward), given.dy, given.x, given.sink, given.lse)
    excluded = exclusion(torch, case, given.x.device)

    def forward(x: Any, mask: Any, sink: Any) -> Any:
        v = scaled(case, x, mask, excluded)
        return normalized(torch, case, v, None if sink is None else sink[:, None, None])

    return functools.partial(wrap(forward), given.x, given.mask, given.sink)


def in_liger(case: Any, given: Given) -> Callable[[], Any]:
    """Return a call of Liger's kernels, which know no scale: of arrays that are scaled already, untimed."""
    from liger_kernel.ops import softmax
    from liger_kernel.ops.utils import calculate_settings

    x, dy = given.x, given.dy
    if not case.backward:
        return functools.partial(softmax.LigerSoftmaxFunction.apply, x * SCALE)
    block, warps = calculate_settings(min(case.hidden, 65536))  # its largest block
    return functools.partial(softmax._softmax_backward, dy * SCALE, x, block, warps, case.hidden > block)


def in_quack(case: Any, given: Given, forward: Any, backward: Any) -> Callable[[], Any]:
    """Return a call of quack's kernels, which know no scale either."""
    if case.backward:
        return functools.partial(backward, given.dy * SCALE, given.x)
    return functools.partial(forward, given.x * SCALE)
