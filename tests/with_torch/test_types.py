# SPDX-License-Identifier: Apache-2.0
"""What type checkers make of a user's file with tensors and modules."""

from __future__ import annotations

import inspect

import pytest
import typed_calls

import transformer_rtc.torch

# What each function and module of `transformer_rtc.torch` gives.
MODULES = {
    "AddLayerNorm": "assert_type(r.AddLayerNorm(64, bias=False)(x, x), tuple[torch.Tensor, torch.Tensor])",
    "AddRMSNorm": "assert_type(r.AddRMSNorm(64, residual_dtype=torch.float32)(x)[1], torch.Tensor)",
    "GEGLU": "assert_type(r.GEGLU('tanh')(x, x), torch.Tensor)",
    "GELU": "assert_type(r.GELU('tanh')(x), torch.Tensor)",
    "LayerNorm": "assert_type(r.LayerNorm(64, bias=False)(x), torch.Tensor)",
    "Patch": "assert_type(r.patch(model, rounding='twice').undo(), None)",
    "RMSNorm": "assert_type(r.RMSNorm([4, 64], eps=1e-6, device='cuda')(x), torch.Tensor)",
    "SiLU": "assert_type(r.SiLU()(x), torch.Tensor)",
    "Softmax": "assert_type(r.Softmax(-1, scale=0.5)(x, causal='aligned'), torch.Tensor)",
    "SwiGLU": "assert_type(r.SwiGLU()(x), torch.Tensor)",
    "kernel_mapping": "assert_type(r.kernel_mapping(rounding='once'), dict[str, dict[str, Any]])",
    "patch": "assert_type(r.patch(model), r.Patch)",
    "patch_mapping": "assert_type(r.patch_mapping(torch.nn.RMSNorm), dict[str, type[torch.nn.Module]])",
    "warmup": "assert_type(r.warmup(model, torch.bfloat16, training=True), list[t.WarmupRecord])",
}


def test_every_name_of_the_package_for_torch_is_used():
    assert MODULES.keys() == set(transformer_rtc.torch.__all__)
    assert dir(transformer_rtc.torch) == sorted([*MODULES, "megatron", "transformer_engine"])
    assert all(inspect.ismodule(getattr(transformer_rtc.torch, name)) for name in ("megatron", "transformer_engine"))


_USES = """

r = t.torch


def modules(model: torch.nn.Module, x: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    assert_type(t.rms_norm(x, parameter, out_dtype=torch.float16, stream=torch.cuda.current_stream()), torch.Tensor)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_knows_what_calls_with_tensors_return(checker, tmp_path):
    pytest.importorskip(checker, reason=f"{checker} is not installed")
    text = typed_calls.user_file("torch.Tensor", "import torch") + _USES
    text += "".join(f"    {line}\n" for line in MODULES.values())
    assert getattr(typed_calls, f"errors_of_{checker}")(text, tmp_path) == ""
