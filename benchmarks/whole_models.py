# SPDX-License-Identifier: Apache-2.0
"""Whole models from Hugging Face's configurations, with random weights, and the ways to run their norms."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import transformer_rtc

EAGER, NN, COMPILED, LIGER, OURS, OURS_COMPILED = (
    "eager",
    "torch.nn",
    "torch.compile",
    "Liger",
    "ours",
    "ours, compiled",
)
WAYS = (EAGER, NN, COMPILED, LIGER, OURS, OURS_COMPILED)
COMPILED_WAYS = (COMPILED, OURS_COMPILED)
LEARNING_RATE = 1e-4


class Model(NamedTuple):
    """A model: its configuration's class, what makes it, its sizes, those of a tiny one, and the shape of a batch."""

    config: str
    auto: str
    full: Mapping[str, Any]
    tiny: Mapping[str, Any]
    batch: int
    tokens: int


CAUSAL = "AutoModelForCausalLM"
# With heads of 128 elements, as models of that width have.
_LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16}
# A tiny model has few layers and rows: each row is simulated.
_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
_TINY_BATCH, _TINY_TOKENS = 2, 5
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
_WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_BERT_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS = {
    "llama": Model(
        "LlamaConfig",
        CAUSAL,
        {**_LLAMA, "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 2048},
        {**_TINY, "num_key_value_heads": 2},
        4,
        2048,
    ),
    "qwen3": Model(
        "Qwen3Config",
        CAUSAL,
        {**_LLAMA, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 2048},
        {**_TINY, "num_key_value_heads": 1, "head_dim": 16},
        4,
        2048,
    ),
    # Gemma 3's 1B with half of its layers and a small vocabulary: its own would hide the layers' time.
    "gemma3": Model(
        "Gemma3TextConfig",
        CAUSAL,
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
        },
        {**_TINY, "num_key_value_heads": 1, "head_dim": 16},
        4,
        2048,
    ),
    "gpt2": Model(
        "GPT2Config",
        CAUSAL,
        {"n_embd": 1600, "n_layer": 12, "n_head": 25, "n_positions": 1024, "vocab_size": 50257, **_WITHOUT_DROPOUT},
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 64, **_NO_ENDS, **_WITHOUT_DROPOUT},
        4,
        1024,
    ),
    "bert": Model(
        "BertConfig",
        "AutoModelForMaskedLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            **_BERT_WITHOUT_DROPOUT,
        },
        {**_TINY, "max_position_embeddings": 64, **_BERT_WITHOUT_DROPOUT},
        16,
        512,
    ),
}


def device_of(tiny: bool) -> str:
    """Return where models are: a tiny one's kernels are simulated on the CPU."""
    return "cpu" if tiny else "cuda"


def kernels_on(tiny: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context in which our kernels run where the model is."""
    return transformer_rtc.using("simulator") if tiny else contextlib.nullcontext()


def shape_of(name: str, tiny: bool) -> tuple[int, int]:
    """Return the sequences of a batch and the tokens of each."""
    return (_TINY_BATCH, _TINY_TOKENS) if tiny else (MODELS[name].batch, MODELS[name].tokens)


def build(name: str, tiny: bool, dtype: Any, seed: int = 0, **changes: Any) -> Any:
    """Return a model in training mode; equal seeds give equal weights."""
    import torch
    import transformers

    model = MODELS[name]
    values = {**(model.tiny if tiny else model.full), **changes}
    config = getattr(transformers, model.config)(**values, use_cache=False)
    torch.manual_seed(seed)
    with torch.device(device_of(tiny)):
        made = getattr(transformers, model.auto).from_config(config, dtype=dtype, attn_implementation="sdpa")
    # GPT-2's class names no loss, for which transformers takes this one with a warning that breaks a compiled graph.
    made.loss_type = made.loss_type or "ForCausalLM"
    return made.train()


def random_batch(name: str, model: Any, tiny: bool, rows: int | None = None, seed: int = 1) -> dict[str, Any]:
    """Return tokens that are their own labels."""
    import torch

    batch, tokens = shape_of(name, tiny)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (rows or batch, tokens), generator=generator).to(device_of(tiny))
    return {"input_ids": ids, "labels": ids}


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def synchronize(tiny: bool) -> None:
    import torch

    if not tiny:
        torch.cuda.synchronize()


def ways_of(name: str, wanted: Sequence[str], tiny: bool) -> list[str]:
    """Return which of the wanted ways a model has.

    LayerNorm is torch.nn's already; torch.nn.RMSNorm has no weight that is centred at zero, as Gemma's is; and Liger
    may not be installed, and needs a GPU.
    """
    without = {NN} if name in ("gemma3", "gpt2", "bert") else set()
    if tiny or importlib.util.find_spec("liger_kernel") is None:
        without.add(LIGER)
    return [way for way in WAYS if way in wanted and way not in without]


def import_way(way: str) -> None:
    """Import what a way needs beside torch."""
    if way in (OURS, OURS_COMPILED):
        importlib.import_module("transformer_rtc.torch")
    elif way == LIGER:
        importlib.import_module("liger_kernel.transformers")


def prepare(way: str, model: Any, tiny: bool) -> Any:
    """Return the model as one of the ways runs it; its parameters stay the same ones."""
    import torch

    if way == NN:
        _swap(model, _torch_norm)
    elif way == LIGER:
        _swap(model, _liger_norm)
    elif way in (OURS, OURS_COMPILED):
        importlib.import_module("transformer_rtc.torch").patch(model)
    if way in COMPILED_WAYS:
        # Inductor's C++ compiler takes longer than a tiny model's whole run.
        return torch.compile(model, backend="aot_eager" if tiny else "inductor")
    return model


def warm_up(model: Any, tiny: bool) -> None:
    """Compile what a model with our norms will need on the GPU; a tiny one's, for one that may not be there."""
    importlib.import_module("transformer_rtc.torch").warmup(model, architectures="sm_90" if tiny else None)


def _swap(model: Any, made: Callable[[Any], Any]) -> None:
    """Put another module in the place of each norm, with the norm's own parameters."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            kind = type(norm).__name__
            if kind.endswith("RMSNorm") or kind == "LayerNorm":
                other = made(norm)
                for key, parameter in norm.named_parameters(recurse=False):
                    setattr(other, key, parameter)
                setattr(parent, name, other)


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _torch_norm(norm: Any) -> Any:
    import torch

    return torch.nn.RMSNorm(norm.weight.shape, _eps(norm), device="meta")


def _liger_norm(norm: Any) -> Any:
    from liger_kernel.transformers.layer_norm import LigerLayerNorm
    from liger_kernel.transformers.rms_norm import LigerRMSNorm, LigerRMSNormForGemma3

    kind, hidden = type(norm).__name__, norm.weight.shape[0]
    if kind == "LayerNorm":
        return LigerLayerNorm(hidden, _eps(norm), bias=True)
    return LigerRMSNormForGemma3(hidden, _eps(norm)) if "Gemma3" in kind else LigerRMSNorm(hidden, _eps(norm))
