# SPDX-License-Identifier: Apache-2.0
"""Compiles the norm kernels of a checkout of NVIDIA/TransformerEngine by NVRTC, as TransformerEngine does.

The kernels, and the registrations that choose one for a size, are read from the checkout: nothing of them is here. Run
as a program, this file compiles the kernels of every size of bandwidth.py, which needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

COMMON = Path("transformer_engine/common")
SPACE = "::transformer_engine::normalization::"
WARP = 32
FINALIZE_THREADS = 1024  # of a tuned kernel's second launch; a general one's has 4 warps
FINALIZE_WARPS = 4
SHORT = {"bfloat16": "bf16", "float32": "fp32"}


class CheckoutError(Exception):
    """The folder is not a checkout that this file can use, or CUDA's headers are missing."""


# ---- Parameters ------------------------------------------------------------------------------------------------------


class BaseParams(ctypes.Structure):
    """KernelParamsBase of kernel_params.h; the compiler checks every offset of these three, by `layout`."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("ctas_per_col", "ctas_per_row", "rows", "cols")),
        *((name, ctypes.c_void_p) for name in ("x", "mu", "rs", "gamma", "workspace", "barrier")),
        ("zero_centered_gamma", ctypes.c_bool),
    )


class ForwardParams(BaseParams):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("z", "beta")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_void_p),
        ("scale_byte_size", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("scale_inv", "amax")),
        ("amax_byte_size", ctypes.c_int),
        ("fp8_out", ctypes.c_bool),
    )


class BackwardParams(BaseParams):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("dz", "add", "dbeta_part", "dgamma_part", "dx", "dbeta", "dgamma")
    )


def layout(params: type[BaseParams], name: str) -> Iterator[str]:
    """Yield assertions that a structure of theirs is laid out as ours."""
    yield f"using Params = {SPACE}{name};"
    yield f"static_assert(sizeof(Params) == {ctypes.sizeof(params)});"
    for field, *_ in (*BaseParams._fields_, *params._fields_):
        offset = getattr(params, field).offset
        # NVRTC has no offsetof; this is what EDG's front end, which NVRTC has, makes of it.
        yield f"static_assert(__INTADDR__(&((Params*)0)->{field}) == {offset});"


# ---- Which kernel, and its program -----------------------------------------------------------------------------------


class Family(NamedTuple):
    """Where an operator's kernels are, and what they are named."""

    folder: str
    prefix: str
    registrations: str
    stage: str

    @property
    def backward(self) -> bool:
        return self.stage == "Backward"

    @property
    def params(self) -> type[BaseParams]:
        return BackwardParams if self.backward else ForwardParams


FAMILIES = {
    "rms_norm": Family("rmsnorm", "rmsnorm_fwd", "rmsnorm_fwd_cuda_kernel.cu", "Forward"),
    "layer_norm": Family("layernorm", "ln_fwd", "ln_fwd_cuda_kernel.cu", "Forward"),
    "rms_norm_backward": Family("rmsnorm", "rmsnorm_bwd", "rmsnorm_bwd_semi_cuda_kernel.cu", "Backward"),
    "layer_norm_backward": Family("layernorm", "ln_bwd", "ln_bwd_semi_cuda_kernel.cu", "Backward"),
}


class Choice(NamedTuple):
    """A registration: the kernel's template arguments. A general kernel's `hidden` is what one CTA holds of a row."""

    tuned: bool
    hidden: int
    ctas_per_row: int
    warps_m: int
    warps_n: int
    load_bytes: int
    finalize_bytes: int  # 0 for a forward kernel


def read(folder: Path, *parts: str) -> str:
    file = folder.joinpath(COMMON, *parts)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckoutError(f"not a checkout of NVIDIA/TransformerEngine with kernels for NVRTC: {error}") from None


def choose(folder: Path, operator: str, dtype: str, columns: int) -> Choice:
    """Return the registration that TeNormalizationRegistry::getKernel takes for aligned arrays of one type."""
    family = FAMILIES[operator]
    text = read(folder, "normalization", family.folder, family.registrations)
    types = [SHORT[dtype]] * 3 + ["fp32"]
    general: dict[int, Choice] = {}
    for found in re.findall(r"^REGISTER_NORM_LAUNCHER\(([^)]*)\);", text, re.MULTILINE):
        _, stage, kind, hidden, *others = (one.strip() for one in found.split(","))
        if stage != family.stage or others[:4] != types:
            continue
        tuned = kind == "tuned"
        numbers = [int(hidden), *([] if tuned else [1]), *map(int, others[4:]), *([] if family.backward else [0])]
        choice = Choice(tuned, *numbers)
        if tuned and choice.hidden == columns:
            return choice
        if not tuned:
            general[choice.hidden] = choice
    if not general:
        raise CheckoutError(f"{family.registrations} registers no general kernel of {operator} in {dtype}")
    # The longest of them for a longer row, which several CTAs share then.
    return general[min((hidden for hidden in general if hidden >= columns), default=max(general))]


class Program(NamedTuple):
    text: str
    expressions: list[str]  # the kernel, and of a backward one its second


def program(operator: str, dtype: str, choice: Choice) -> Program:
    """Return the text that includes the kernels' header, and the names of the instantiations."""
    family = FAMILIES[operator]
    kind = "tuned" if choice.tuned else "general"
    types = f"{', '.join([SPACE + SHORT[dtype]] * 3)}, {SPACE}fp32, uint32_t"
    numbers = (choice.hidden, choice.ctas_per_row, choice.warps_m, choice.warps_n, choice.load_bytes)
    traits = f"{SPACE}Kernel_traits<{types}, {', '.join(map(str, numbers))}>"
    fused_add = ", false" if operator == "rms_norm_backward" else ""
    expressions = [f"&{SPACE}{family.prefix}_{kind}_kernel<{traits}{fused_add}>"]
    if family.backward:
        arguments = f"{SPACE}{SHORT[dtype]}, {SPACE}fp32, {FINALIZE_WARPS}, 1, {choice.finalize_bytes}, {WARP}"
        if choice.tuned:
            arguments = f"{choice.hidden}, {types}, {FINALIZE_THREADS}, {choice.finalize_bytes}"
            arguments = f"{SPACE}Kernel_traits_finalize<{arguments}>"
        expressions.append(f"&{SPACE}{family.prefix}_finalize_{kind}_kernel<{arguments}>")
    included = (f'#include "{name}"' for name in ("kernel_traits.h", f"{family.prefix}_kernels.cuh"))
    text = "\n".join((*included, *layout(family.params, f"{family.stage}KernelParams"), ""))
    return Program(text, expressions)


# ---- NVRTC and the driver --------------------------------------------------------------------------------------------


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a function of the bindings gives beside its status, which must be success."""
    status, *values = result
    if int(status):
        raise RuntimeError(status.name)
    return values[0] if values else None


@functools.cache
def cuda_headers(major: int) -> Path:
    """Return the folder of CUDA's headers of a major version: a wheel's, or a toolkit's."""
    wheels = [Path(entry, "nvidia", name, "include") for entry in sys.path for name in ("cuda_runtime", f"cu{major}")]
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    for folder in (*wheels, *(Path(home, "include") for home in (*homes, "/usr/local/cuda") if home)):
        header = folder / "cuda.h"
        if header.exists() and (folder / "cuda_fp8.h").exists():
            version = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(encoding="utf-8"))
            if version and int(version[1]) // 1000 == major:
                return folder
    wheel = "nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime"
    raise CheckoutError(f"CUDA {major}'s headers are missing: pip install '{wheel}=={major}.*'")


class Compiled(NamedTuple):
    cubin: bytes
    symbols: list[bytes]


_compiled: dict[tuple[Any, ...], Compiled] = {}


def compile_kernels(folder: Path, operator: str, dtype: str, choice: Choice, architecture: int) -> Compiled:
    """Return the kernels of a registration, compiled once."""
    key = (folder, operator, dtype, choice, architecture)
    if key not in _compiled:
        _compiled[key] = _compile(*key)
    return _compiled[key]


def compile_at_once(folder: Path, wanted: Iterable[tuple[str, str, int]], architecture: int) -> None:
    """Compile the kernels of these operators, types and columns in processes, as NVRTC gains little by threads."""
    keys = list(
        dict.fromkeys((folder, op, dtype, choose(folder, op, dtype, n), architecture) for op, dtype, n in wanted)
    )
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        _compiled.update(zip(keys, pool.map(_compile, *zip(*keys, strict=True)), strict=True))


def _compile(folder: Path, operator: str, dtype: str, choice: Choice, architecture: int) -> Compiled:
    """Compile with the options that TransformerEngine gives NVRTC."""
    from cuda.bindings import nvrtc

    family = FAMILIES[operator]
    headers = {
        "utils.cuh": read(folder, "utils.cuh"),
        "util/math.h": read(folder, "util", "math.h"),
        **{name: read(folder, "normalization", name) for name in ("kernel_params.h", "kernel_traits.h")},
    }
    kernels = f"{family.prefix}_kernels.cuh"
    headers[kernels] = read(folder, "normalization", family.folder, kernels)
    text, expressions = program(operator, dtype, choice)
    major, _ = nvrtc.nvrtcVersion()[1:]
    options = ["--std=c++17", f"--gpu-architecture=sm_{architecture}", f"-I{cuda_headers(major)}"]
    names, texts = ([one.encode() for one in some] for some in (headers, headers.values()))
    made = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"transformer_engine.cu", len(names), texts, names))
    try:
        for expression in expressions:
            checked(nvrtc.nvrtcAddNameExpression(made, expression.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(made, len(options), [one.encode() for one in options])
        if int(status):
            log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(made)))
            checked(nvrtc.nvrtcGetProgramLog(made, log))
            raise RuntimeError(log.rstrip(b"\0").decode(errors="replace"))
        cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(made)))
        checked(nvrtc.nvrtcGetCUBIN(made, cubin))
        symbols = [bytes(checked(nvrtc.nvrtcGetLoweredName(made, one.encode()))) for one in expressions]
    finally:
        nvrtc.nvrtcDestroyProgram(made)
    return Compiled(bytes(cubin), symbols)


# ---- Without a GPU ---------------------------------------------------------------------------------------------------


def version(folder: Path) -> str:
    """Return the checkout's version and commit, as far as it has them."""
    file = folder / "build_tools" / "VERSION.txt"
    said = [file.read_text(encoding="utf-8").strip()] if file.exists() else []
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        said += subprocess.run(command, capture_output=True, text=True).stdout.split()
    return " ".join(said) or "unknown"


def main() -> None:
    from bandwidth_cases import MODELS, RAGGED, SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of NVIDIA/TransformerEngine")
    parser.add_argument("--architecture", type=int, default=90, metavar="SM", help="default: 90")
    parser.add_argument("--models", action="store_true", help="the sizes of bandwidth.py --models too")
    arguments = parser.parse_args()
    shapes = (*SHAPES, *RAGGED, *(MODELS if arguments.models else ()))
    sizes = sorted({columns for _, columns in shapes})
    wanted = list(itertools.product(FAMILIES, SHORT, sizes))
    compile_at_once(arguments.folder, wanted, arguments.architecture)
    for operator, dtype, columns in wanted:
        choice = choose(arguments.folder, operator, dtype, columns)
        made = compile_kernels(arguments.folder, operator, dtype, choice, arguments.architecture)
        print(operator, dtype, columns, *choice, f"{len(made.cubin)} bytes")


if __name__ == "__main__":
    main()
