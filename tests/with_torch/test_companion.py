# SPDX-License-Identifier: Apache-2.0
"""The companion wheel's list is what its models ask for, and a wheel of one model lets it run without a compile."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transformer_rtc import manifest, record, using
from transformer_rtc.cache import DiskCache
from transformer_rtc.companion import MANIFEST, PACKAGE, Companion
from transformer_rtc.errors import CompilerNotFoundError
from transformer_rtc.kernel_manager import KernelManager
from transformer_rtc.request import Asked
from transformer_rtc.settings import settings
from transformer_rtc.spec import ARCHITECTURES, KernelSpec
from transformer_rtc.warming import kernels_of

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from transformer_rtc.torch import Softmax, megatron, transformer_engine  # noqa: E402

FOLDER = Path(__file__).parents[2] / "companion"
# That none of the kernels depends on.
SMALL = {"intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0}


@pytest.fixture
def companion(monkeypatch):
    """Return what imports a program of the wheel."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_list_is_what_the_models_ask_for(companion):
    make_list = companion("make_list")
    written = make_list.LIST.read_text().splitlines()
    assert written == make_list.lines(make_list.asked_by_all()), "run python companion/make_list.py"
    entries = manifest.read(make_list.LIST)
    assert len(entries) == len(written) and not any(entry.request.unaligned for entry in entries)
    operators = {entry.request.operator for entry in entries}
    norms = {f"{prefix}{norm}" for norm in ("rms_norm", "layer_norm") for prefix in ("", "add_")}
    assert {*norms, "softmax", "softmax_backward", "silu_and_mul_backward", "gelu_and_mul"} <= operators


def test_a_wheel_of_one_model_is_installed_and_nothing_is_compiled(companion, tmp_path):
    command = [sys.executable, str(FOLDER / "build.py"), "--models", "llama-3.1-8b", "--architectures", "sm_90"]
    built = subprocess.run([*command, "-o", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert f"{wheel}: {wheel.stat().st_size} bytes" in built.stdout
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, timeout=300)

    def none(*_):
        raise CompilerNotFoundError("there is no NVRTC")

    options = dataclasses.replace(settings, on_compile="error")
    manager = KernelManager(DiskCache(None), none, none, options)
    manager.cache.companion = Companion(lambda: str(site / PACKAGE))
    make_list = companion("make_list")
    module, hidden = make_list.made(companion("models").MODELS["llama-3.1-8b"])
    asked = [
        entry
        for training, dtype in itertools.product((False, True), (torch.bfloat16, torch.float16, torch.float32))
        for entry in make_list.asked_by(module.to(dtype), None, training)
    ]
    found = kernels(asked)
    assert hidden == 4096 and len(found) >= 12
    assert {manager.image(spec, 90).origin for spec in found} == {"companion"}


@pytest.fixture(scope="module")
def listed() -> set[KernelSpec]:
    """Return the kernels of the list for sm_90."""
    return kernels(manifest.read(FOLDER / MANIFEST))


def kernels(entries) -> set[KernelSpec]:
    return {spec for entry in entries for spec in kernels_of(entry, ARCHITECTURES[90])}


def asked_by(work: Callable[[], object]) -> tuple[set[str], set[KernelSpec]]:
    """Return what some work asks for in the simulator: operators; and kernels, but for earlier tests'."""
    with record() as earlier:
        pass
    with using("simulator"), record() as asked:
        work()
    before = set(map(manifest.line, earlier))
    new = [entry for entry in asked if manifest.line(entry) not in before]
    return {entry.request.operator for entry in asked if isinstance(entry, Asked)}, kernels(new)


@pytest.mark.thorough(share=0.4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "gemma-3-270m", "gpt2", "bert-base", "vit-tiny"])
def test_a_step_of_a_model_asks_for_what_the_list_has(name, dtype, companion, listed):
    model = companion("models").MODELS[name]
    model = model._replace(sizes=SMALL | model.sizes if "Bert" not in model.config else model.sizes)
    module, _ = companion("make_list").made(model, layers=1, device="cpu")
    module = module.to(getattr(torch, dtype))
    if name.startswith("vit"):
        given = {"pixel_values": torch.zeros(1, 3, 224, 224, dtype=getattr(torch, dtype))}
    else:
        given = {"input_ids": torch.arange(8)[None]}

    def work():
        with torch.no_grad():
            module(**given)
        module(**given).last_hidden_state.float().square().mean().backward()

    operators, found = asked_by(work)
    assert found <= listed and {"rms_norm_backward", "layer_norm_backward"} & operators


def test_modules_of_softmax_ask_for_what_the_list_has(listed):
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)

    def work():
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(2, 2, 8, 8, dtype=dtype, requires_grad=True)
            bf16 = dtype is torch.bfloat16
            for given in ({}, {"mask": mask}, {"causal": "aligned"}, {"causal": "upper_triangular", "mask": mask}):
                Softmax(-1)(x, **given).sum().backward()
            for kind, given in itertools.product(("padding", "causal"), (None, mask)):
                megatron.FusedScaleMaskSoftmax(False, bf16, kind, True, None, True, None)(x, given).sum().backward()
            for kind in ("no_mask", "padding", "causal", "causal_bottom_right"):
                transformer_engine.FusedScaleMaskSoftmax(None)(x, mask, kind, 0.5).sum().backward()

    operators, found = asked_by(work)
    assert found <= listed and operators >= {"softmax", "softmax_backward"}
