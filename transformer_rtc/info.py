"""What this installation found: versions, devices, the cache, what is missing and the command that mends it."""

from __future__ import annotations

import os
import platform
import sys

from . import _native, compiler, static
from .errors import TransformerRtcError
from .launch import device_limits
from .manager import manager
from .simulator import toolchain
from .version import __version__


def run() -> int:
    """Print what was found. Returns 0 if kernels can run here, 1 if something is missing."""
    missing: list[str] = []

    def line(name: str, value: object) -> None:
        print(f"{name:16s} {value}")

    line("transformer_rtc", f"{__version__} in {os.path.dirname(__file__)}")
    line("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}")

    try:
        version = _native.driver_version()
        line("driver", f"runs CUDA {version // 1000}.{version % 1000 // 10}")
        for ordinal in range(_native.device_count()):
            limits = device_limits(ordinal)
            memory = _native.device_memory(ordinal) / 2**30
            major, minor = divmod(limits.architecture, 10)
            clusters = f"clusters of up to {limits.max_cluster_size}" if limits.max_cluster_size > 1 else "no clusters"
            line(
                f"cuda:{ordinal}",
                f"{_native.device_name(ordinal)}, {memory:.0f} GiB, compute capability {major}.{minor}, "
                f"{limits.shared_memory_per_cta // 1024} KiB of shared memory per CTA, {clusters}",
            )
    except TransformerRtcError as error:
        line("driver", error)
        missing.append(
            "a GPU: install an NVIDIA driver, 525.60.13 (CUDA 12.0) or newer; 580 or newer for the extra cu13. Until "
            "then, arrays of the host run on the CPU, in the simulator"
        )

    found = compiler.versions()
    line("bindings", f"cuda-bindings {found['cuda_bindings']}" if "cuda_bindings" in found else "none")
    try:
        line("NVRTC", compiler.compiler_identity())
    except TransformerRtcError as error:
        line("NVRTC", error)
        missing.append("NVRTC: pip install 'transformer_rtc[cu12]', or [cu13] for a driver of CUDA 13")

    try:
        line("simulator", f"compiles with {toolchain.compiler_identity().split()[0]}")
    except TransformerRtcError as error:
        line("simulator", error)

    files = static.manifest().get("files")
    if isinstance(files, list):
        line("static kernels", f"{len(files)} modules, {sum(file['bytes'] for file in files) / 1024:.0f} KiB")
    else:
        line("static kernels", "none: this build left them out; nothing needs them but TRANSFORMER_RTC_FORCE_STATIC=1")

    if manager.cache.folder is None:
        line("disk cache", "off: TRANSFORMER_RTC_CACHE_DIR is empty")
    else:
        entries, size = manager.cache.size()
        line("disk cache", f"{manager.cache.folder}, {entries} entries, {size / 1024:.0f} KiB")
        existing = manager.cache.folder
        while not os.path.exists(existing):
            existing = os.path.dirname(existing)
        if not os.access(existing, os.W_OK):
            missing.append(f"a cache: {existing} cannot be written; set TRANSFORMER_RTC_CACHE_DIR to a folder that can")

    for name in sorted(name for name in os.environ if name.startswith("TRANSFORMER_RTC_")):
        line(name, os.environ[name])
    for what in missing:
        line("missing", what)
    return 1 if missing else 0
