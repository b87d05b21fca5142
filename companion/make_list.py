# SPDX-License-Identifier: Apache-2.0
"""What the companion wheel's models ask for, as the lines of its manifest."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
from models import HEAD_SIZES, MODELS, Model

from transformer_rtc import manifest, warming
from transformer_rtc.companion import MANIFEST
from transformer_rtc.ops.softmax.config import BUCKETS
from transformer_rtc.request import Asked
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32, DType
from transformer_rtc.torch import AddLayerNorm, AddRMSNorm, RMSNorm, patch
from transformer_rtc.torch.warming import asked_by

__all__ = ["LIST", "asked_by_all", "asked_by_model", "lines"]

LIST = Path(__file__).with_name(MANIFEST)

# Of x, and of the parameters.
_TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
)
_NAMES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
_SOFTMAX = (
    ("softmax", {}),
    ("softmax", {"mask": "bool"}),
    ("softmax", {"causal": "aligned"}),
    ("softmax", {"causal": "aligned", "mask": "bool"}),
    ("softmax_backward", {}),
    ("softmax_backward", {"causal": "aligned"}),
)


def made(model: Model, layers: int = 2, device: str = "meta") -> tuple[torch.nn.Module, int]:
    """Return a patched model of so many layers, and its hidden size."""
    config = getattr(transformers, model.config)(**model.sizes)
    for name in ("num_hidden_layers", "num_decoder_layers"):
        if hasattr(config, name):
            setattr(config, name, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device(device):
        module = transformers.AutoModel.from_config(config)
    patch(module)
    return module, config.hidden_size


def asked_by_model(model: Model) -> Iterator[Asked]:
    """Yield what a patched model asks for, and what it would with its norms fused with sums."""
    module, hidden = made(model)
    norms = {asked.request.operator for asked in asked_by(module, None, False)}
    yield from _asked_by(module)
    # T5's norm, which is no class of RMSNorm and is left alone, computes what RMSNorm does.
    sums = AddLayerNorm if "layer_norm" in norms else AddRMSNorm
    yield from _asked_by(sums(hidden, device="meta"))
    for x, weight in _TYPES:
        yield from _of_norm_added("layer_norm" if sums is AddLayerNorm else "rms_norm", hidden, x, weight)


def _asked_by(module: torch.nn.Module) -> Iterator[Asked]:
    for x, weight in _TYPES:
        module.to(weight)
        for training in (False, True):
            yield from asked_by(module, x, training)


def _of_norm_added(norm: str, columns: int, x: torch.dtype, weight: torch.dtype) -> Iterator[Asked]:
    """Yield what `rms_norm_add` or `layer_norm_add` asks for: its backward is the norm's."""
    for training in (False, True):
        values = {"weight": _NAMES[weight].name, "return_rstd": training}
        if norm == "layer_norm":
            values |= {"bias": _NAMES[weight].name, "return_mean": training}
        yield _asked(f"{norm}_add", _NAMES[x], columns, values)


def _asked(operator: str, dtype: DType, columns: int, values: dict[str, object]) -> Asked:
    return Asked(warming.request_of(operator, dtype, columns, False, False, values))


def _of_softmax() -> Iterator[Asked]:
    for columns in BUCKETS:
        for dtype in (BFLOAT16, FLOAT16, FLOAT32):
            for operator, values in _SOFTMAX:
                yield _asked(operator, dtype, columns, values)


def asked_by_all() -> Iterator[Asked]:
    """Yield what all models ask for, norms of heads, and softmax of all lengths."""
    for model in {str(model): model for model in MODELS.values()}.values():  # several have the same sizes
        yield from asked_by_model(model)
    for size in HEAD_SIZES:
        norm = transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm(size)
        patch(norm)
        yield from _asked_by(norm)
        yield from _asked_by(RMSNorm(size))
    yield from _of_softmax()


def lines(asked: Iterable[Asked]) -> list[str]:
    """Return the lines of a manifest, each once."""
    return sorted(set(map(manifest.line, asked)))


def main() -> None:
    argparse.ArgumentParser(description=f"Write {MANIFEST}, the list of the companion wheel's kernels.").parse_args()
    found = lines(asked_by_all())
    LIST.write_text("".join(f"{line}\n" for line in found))
    print(f"{len(found)} lines")


if __name__ == "__main__":
    main()
