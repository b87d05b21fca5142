# SPDX-License-Identifier: Apache-2.0
"""What bandwidth.py takes from a checkout of TransformerEngine: the registration of a size, its workspace, its text.

With the folder of a checkout in TRANSFORMER_ENGINE, its kernels are compiled, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REGISTRATIONS = """\
#define REGISTER_NORM_LAUNCHER(NORM_TYPE, NORM_STAGE, ...)
REGISTER_NORM_LAUNCHER(RMSNorm, Backward, tuned, 1024, fp32, fp32, fp32, fp32, 1, 2, 2, 16, 4);
REGISTER_NORM_LAUNCHER(RMSNorm, Backward, tuned, 1024, bf16, bf16, bf16, fp32, 1, 4,
                       1, 16, 4);
REGISTER_NORM_LAUNCHER(RMSNorm, BackwardAdd, tuned, 2048, bf16, bf16, bf16, fp32, 1, 1, 4, 16, 4, true);
REGISTER_NORM_LAUNCHER(RMSNorm, Backward, general, 512, bf16, bf16, bf16, fp32, 4, 1, 16, 4);
REGISTER_NORM_LAUNCHER(RMSNorm, Backward, general, 4096, bf16, bf16, bf16, fp32, 1, 4, 16, 4);
REGISTER_NORM_LAUNCHER(RMSNorm, Backward, general, 8192, bf16, fp32, bf16, fp32, 1, 4, 16, 4);
"""


@pytest.fixture
def text(benchmark_modules):
    return benchmark_modules("transformer_engine_text")


@pytest.fixture
def checkout(tmp_path):
    file = tmp_path / "transformer_engine/common/normalization/rmsnorm/rmsnorm_bwd_semi_cuda_kernel.cu"
    file.parent.mkdir(parents=True)
    file.write_text(REGISTRATIONS)
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "choice"),
    [
        (1024, (True, 1024, 1, 4, 1, 16, 4)),
        (512, (False, 512, 1, 4, 1, 16, 4)),
        (513, (False, 4096, 1, 1, 4, 16, 4)),
        (2048, (False, 4096, 1, 1, 4, 16, 4)),
        (4097, (False, 4096, 1, 1, 4, 16, 4)),
    ],
)
def test_a_size_has_its_tuned_kernel_or_the_shortest_general_one_that_holds_a_row(text, checkout, columns, choice):
    assert text.choose(checkout, "rms_norm_backward", "bfloat16", columns) == choice


def test_a_type_that_is_not_registered_is_named(text, checkout):
    with pytest.raises(text.CheckoutError, match="no general kernel of rms_norm_backward in float32"):
        text.choose(checkout, "rms_norm_backward", "float32", 768)


def test_another_folder_is_refused_by_the_missing_file(text, tmp_path):
    with pytest.raises(text.CheckoutError, match=r"ln_fwd_cuda_kernel\.cu"):
        text.choose(tmp_path, "layer_norm", "bfloat16", 1024)


@pytest.mark.parametrize(
    ("operator", "choice", "columns", "ctas_per_row", "sizes"),
    [
        ("rms_norm", (True, 1024, 1, 4, 1, 16, 0), 1024, 1, (0, 0, 0, 0)),
        ("layer_norm", (True, 65536, 8, 1, 4, 16, 0), 65536, 8, (64, 128, 8, 0)),
        ("layer_norm", (False, 8192, 1, 1, 4, 16, 0), 16384, 2, (0, 16, 8, 0)),
        ("rms_norm_backward", (True, 8192, 1, 1, 4, 16, 4), 8192, 1, (32832, 0, 0, 32768)),
        ("layer_norm_backward", (True, 8192, 2, 1, 4, 16, 4), 8192, 2, (64, 32, 8, 32768)),
        ("layer_norm_backward", (False, 4096, 1, 1, 4, 16, 4), 8200, 3, (0, 48, 8, 32800)),
    ],
)
def test_shared_memory_and_workspace_have_the_bytes_that_the_kernels_use(
    text, benchmark_modules, operator, choice, columns, ctas_per_row, sizes
):
    launch = benchmark_modules("transformer_engine_launch")
    assert launch.sizes(operator, text.Choice(*choice), columns, ctas_per_row) == sizes


@pytest.mark.parametrize("columns", [1024, 3000, 65536])
def test_the_text_compiles_with_parameters_laid_out_as_ours(text, columns):
    folder = os.environ.get("TRANSFORMER_ENGINE")
    if folder is None:
        pytest.skip("TRANSFORMER_ENGINE does not name a checkout")
    for operator in text.FAMILIES:
        choice = text.choose(Path(folder), operator, "bfloat16", columns)
        compiled = text.compile_kernels(Path(folder), operator, "bfloat16", choice, 90)
        assert len(compiled.symbols) == 1 + operator.endswith("backward")
        assert all(symbol in compiled.cubin for symbol in compiled.symbols)
