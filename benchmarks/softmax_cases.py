"""What bandwidth.py needs to know of softmax: its arrays, what is expected of it, and how others compute it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformer_rtc

SCALE = 0.5
MASKED_SHARE = 0.3
# [batch, heads, queries, keys] of the masked and causal cases, as in shared/reference/peers-h200.md; queries are keys.
MATRICES = ((8, 16, 1024), (2, 16, 2048), (1, 8, 4096), (1, 4, 8192), (1, 4, 16384), (1, 2, 32768))
ALIGNED_QUERIES = 1024  # of which the last one sees the last key
# Of MATRICES in bfloat16: the fastest of torch.compile and TransformerEngine, to the copy beside it, on another H200.
PEERS = {"masked": (0.71, 0.47, 0.36, 0.40, 0.41), "causal": (0.74, 0.51, 0.36, 0.28, 0.29)}


def make(torch: Any, case: Any, normal: Callable[..., Any], device: str) -> tuple[Any, Any, Any]:
    """Return x, or y of a backward case; dy, or None; and the mask, or None."""
    shape = (*case.matrix, case.rows, case.hidden) if case.matrix else (case.rows, case.hidden)
    x = normal(*shape)
    mask = None
    if case.kind == "masked":
        batch, _ = case.matrix
        mask = torch.rand((batch, 1, case.rows, case.hidden), device=device) < MASKED_SHARE
    if not case.backward:
        return x, None, mask
    excluded = exclusion(torch, case, device, mask)
    y = torch.empty_like(x)
    for one, scores in zip(
        y.flatten(0, -3) if case.matrix else [y], x.flatten(0, -3) if case.matrix else [x], strict=True
    ):
        one.copy_(plain(torch, scores, None if excluded is None else excluded.flatten(0, -3)[0]))
    return y, normal(*shape), mask


def exclusion(torch: Any, case: Any, device: str, mask: Any) -> Any:
    """Return what does not take part, to be broadcast; None: everything does."""
    if mask is not None or not case.matrix:
        return mask
    queries = torch.arange(case.rows, device=device)[:, None] + (case.hidden - case.rows)
    return (torch.arange(case.hidden, device=device)[None, :] > queries)[None, None]


def plain(torch: Any, x: Any, excluded: Any) -> Any:
    scores = x * SCALE
    return torch.softmax(scores if excluded is None else scores.masked_fill(excluded, float("-inf")), -1)


def expected(torch: Any, case: Any, some: Any, x: Any, dy: Any, mask: Any, device: str) -> Any:
    """Return the result in float64 of some rows [some, columns] of the flattened rows."""
    excluded = exclusion(torch, case, device, mask)
    if excluded is not None:
        excluded = excluded.expand(*case.matrix, case.rows, case.hidden).reshape(-1, case.hidden)[some]
    x = x.reshape(-1, case.hidden)[some].double()
    if not case.backward:
        return plain(torch, x, excluded)
    dy = dy.reshape(-1, case.hidden)[some].double()
    return SCALE * x * (dy - (dy * x).sum(-1, keepdim=True))


def options(case: Any, mask: Any) -> dict[str, Any]:
    """Return the keywords of our functions."""
    found: dict[str, Any] = {"scale": SCALE}
    if mask is not None and not case.backward:
        found["mask"] = mask
    if case.kind in ("causal", "aligned"):
        found["causal"] = "aligned"
    return found


def ours(case: Any, x: Any, dy: Any, mask: Any) -> Callable[[], Any]:
    function = getattr(transformer_rtc, case.operator)
    arrays = (dy, x) if case.backward else (x,)
    return functools.partial(function, *arrays, **options(case, mask))


def in_torch(torch: Any, case: Any, x: Any, dy: Any, mask: Any, wrap: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a call of the same in torch's operators; `wrap` compiles a function, or leaves it."""
    excluded = exclusion(torch, case, x.device, mask)
    if case.backward:
        gradient = wrap(lambda dy, y: torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype) * SCALE)
        return functools.partial(gradient, dy, x)
    return functools.partial(wrap(lambda x, excluded: plain(torch, x, excluded)), x, excluded)


def in_liger(case: Any, x: Any, dy: Any) -> Callable[[], Any]:
    """Return a call of Liger's kernels, which know no scale: of arrays that are scaled already, untimed."""
    from liger_kernel.ops import softmax
    from liger_kernel.ops.utils import calculate_settings

    if not case.backward:
        return functools.partial(softmax.LigerSoftmaxFunction.apply, x * SCALE)
    block, warps = calculate_settings(min(case.hidden, 65536))  # its largest block
    return functools.partial(softmax._softmax_backward, dy * SCALE, x, block, warps, case.hidden > block)
