# SPDX-License-Identifier: Apache-2.0
"""The models whose kernels the companion wheel has, by their published sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["HEAD_SIZES", "MODELS", "Model"]


class Model(NamedTuple):
    """A model of transformers.

    Attributes
    ----------
    config : str
        Its configuration's class.
    sizes : dict
        What the configuration is given, as far as a norm's or an activation's kernel depends on it.
    """

    config: str
    sizes: dict[str, Any]


# Of norms of queries and keys.
HEAD_SIZES = (64, 80, 96, 112, 128, 160, 192, 256)

_FEW_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def _llama(hidden: int, heads: int) -> Model:
    return Model("LlamaConfig", {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads})


def _llama4() -> Model:
    return Model("Llama4TextConfig", {"hidden_size": 5120, "num_local_experts": 2})


def _qwen2(hidden: int, heads: int) -> Model:
    return Model("Qwen2Config", {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads})


def _deepseek(version: int, hidden: int, q_lora_rank: int | None = 1536) -> Model:
    ranks = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 512}
    return Model(f"DeepseekV{version}Config", {"hidden_size": hidden, **ranks, **_FEW_EXPERTS})


def _qwen3(hidden: int, experts: bool = False) -> Model:
    config, few = ("Qwen3MoeConfig", {"num_experts": 4}) if experts else ("Qwen3Config", {})
    return Model(config, {"hidden_size": hidden, "head_dim": 128, **few})


def _gemma2(hidden: int, head: int) -> Model:
    return Model("Gemma2Config", {"hidden_size": hidden, "head_dim": head})


def _gemma3(hidden: int, head: int) -> Model:
    return Model("Gemma3TextConfig", {"hidden_size": hidden, "head_dim": head})


def _mistral(hidden: int, heads: int) -> Model:
    return Model("MistralConfig", {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": 128})


def _mixtral(hidden: int, heads: int) -> Model:
    return Model("MixtralConfig", {"hidden_size": hidden, "num_attention_heads": heads, "num_local_experts": 2})


def _gpt2(hidden: int, heads: int) -> Model:
    return Model("GPT2Config", {"n_embd": hidden, "n_head": heads})


def _bert(hidden: int) -> Model:
    return Model("BertConfig", {"hidden_size": hidden, "num_attention_heads": hidden // 64})


def _t5(hidden: int, gated: bool) -> Model:
    return Model("T5Config", {"d_model": hidden, "feed_forward_proj": "gated-gelu" if gated else "relu"})


def _vit(hidden: int, heads: int) -> Model:
    return Model("ViTConfig", {"hidden_size": hidden, "num_attention_heads": heads})


MODELS = {
    "llama-7b": _llama(4096, 32),
    "llama-13b": _llama(5120, 40),
    "llama-30b": _llama(6656, 52),
    "llama-65b": _llama(8192, 64),
    "llama-2-7b": _llama(4096, 32),
    "llama-2-13b": _llama(5120, 40),
    "llama-2-70b": _llama(8192, 64),
    "llama-3-8b": _llama(4096, 32),
    "llama-3-70b": _llama(8192, 64),
    "llama-3.1-8b": _llama(4096, 32),
    "llama-3.1-70b": _llama(8192, 64),
    "llama-3.1-405b": _llama(16384, 128),
    "llama-3.2-1b": _llama(2048, 32),
    "llama-3.2-3b": _llama(3072, 24),
    "llama-3.3-70b": _llama(8192, 64),
    "llama-4-scout": _llama4(),
    "llama-4-maverick": _llama4(),
    "qwen2-0.5b": _qwen2(896, 14),
    "qwen2-1.5b": _qwen2(1536, 12),
    "qwen2-7b": _qwen2(3584, 28),
    "qwen2-72b": _qwen2(8192, 64),
    "qwen2.5-0.5b": _qwen2(896, 14),
    "qwen2.5-1.5b": _qwen2(1536, 12),
    "qwen2.5-3b": _qwen2(2048, 16),
    "qwen2.5-7b": _qwen2(3584, 28),
    "qwen2.5-14b": _qwen2(5120, 40),
    "qwen2.5-32b": _qwen2(5120, 40),
    "qwen2.5-72b": _qwen2(8192, 64),
    "qwen3-0.6b": _qwen3(1024),
    "qwen3-1.7b": _qwen3(2048),
    "qwen3-4b": _qwen3(2560),
    "qwen3-8b": _qwen3(4096),
    "qwen3-14b": _qwen3(5120),
    "qwen3-32b": _qwen3(5120),
    "qwen3-30b-a3b": _qwen3(2048, experts=True),
    "qwen3-235b-a22b": _qwen3(4096, experts=True),
    "gemma-2-2b": _gemma2(2304, 256),
    "gemma-2-9b": _gemma2(3584, 256),
    "gemma-2-27b": _gemma2(4608, 128),
    "gemma-3-270m": _gemma3(640, 256),
    "gemma-3-1b": _gemma3(1152, 256),
    "gemma-3-4b": _gemma3(2560, 256),
    "gemma-3-12b": _gemma3(3840, 256),
    "gemma-3-27b": _gemma3(5376, 128),
    "mistral-7b": _mistral(4096, 32),
    "mistral-nemo": _mistral(5120, 32),
    "mistral-small": _mistral(5120, 32),
    "mistral-large": _mistral(12288, 96),
    "mixtral-8x7b": _mixtral(4096, 32),
    "mixtral-8x22b": _mixtral(6144, 48),
    "deepseek-v2-lite": _deepseek(2, 2048, None),
    "deepseek-v2": _deepseek(2, 5120),
    "deepseek-v3": _deepseek(3, 7168),
    "deepseek-r1": _deepseek(3, 7168),
    "gpt2": _gpt2(768, 12),
    "gpt2-medium": _gpt2(1024, 16),
    "gpt2-large": _gpt2(1280, 20),
    "gpt2-xl": _gpt2(1600, 25),
    "bert-base": _bert(768),
    "bert-large": _bert(1024),
    "t5-small": _t5(512, gated=False),
    "t5-base": _t5(768, gated=False),
    "t5-large": _t5(1024, gated=False),
    "flan-t5-base": _t5(768, gated=True),
    "flan-t5-large": _t5(1024, gated=True),
    "flan-t5-xl": _t5(2048, gated=True),
    "flan-t5-xxl": _t5(4096, gated=True),
    "vit-tiny": _vit(192, 3),
    "vit-small": _vit(384, 6),
    "vit-base": _vit(768, 12),
    "vit-large": _vit(1024, 16),
    "vit-huge": _vit(1280, 16),
}
