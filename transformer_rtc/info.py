# SPDX-License-Identifier: Apache-2.0
"""What this installation found: versions, devices, the cache, what is missing and the command that mends it."""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import Any

from . import _native, compiler, manifest, static
from .cache_folder import ADVICE
from .companion import MANIFEST
from .device import device_limits, is_too_old, too_old
from .errors import ArgumentError, DeviceNotFoundError, TransformerRtcError
from .kernel_manager import manager
from .settings import PREFIX, settings, unknown_lines
from .simulator import toolchain
from .spec import ARCHITECTURES, Target
from .version import __version__
from .warming import kernels_of

__all__ = ["gather", "lines"]


def gather() -> dict[str, Any]:
    """Return what was found, of JSON's types; ``"missing"`` is what keeps kernels from running, or from being kept."""
    missing = [f"a setting that is accepted: {problem}" for problem in settings.problems]
    notes = unknown_lines(settings)
    try:
        simulator: dict[str, str] = {"compiler": toolchain.compiler_identity().split()[0]}
    except TransformerRtcError as error:
        simulator = {"error": str(error)}
    driver = _driver(missing, notes, simulator)
    nvrtc = _nvrtc(missing, notes, driver.get("cuda"))
    bindings = compiler.versions().get("cuda_bindings")
    files = static.manifest().get("files")
    modules = files if isinstance(files, list) else []
    return {
        "version": __version__,
        "folder": os.path.dirname(__file__),
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "driver": driver,
        "bindings": bindings,
        "nvrtc": nvrtc,
        "simulator": simulator,
        "static_kernels": {"modules": len(modules), "bytes": sum(file["bytes"] for file in modules)},
        "cache": _cache(missing),
        "companion": _companion(len(driver["devices"]), notes),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIX)},
        "missing": missing,
        "notes": notes,
    }


def _driver(missing: list[str], notes: list[str], simulator: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": []}
    try:
        version = _native.driver_version()
        found["cuda"] = f"{version // 1000}.{version % 1000 // 10}"
        old: list[str] = []
        for ordinal in range(_native.device_count()):
            limits = device_limits(ordinal)
            if is_too_old(limits):
                old.append(f"cuda:{ordinal} {too_old(limits)}")
            found["devices"].append(
                {
                    "name": _native.device_name(ordinal),
                    "bytes": _native.device_memory(ordinal),
                    "architecture": f"sm_{limits.architecture}",
                    "shared_memory_per_cta": limits.shared_memory_per_cta,
                    "max_cluster_size": limits.max_cluster_size,
                }
            )
        if not found["devices"]:
            found["error"] = "the driver shows no GPU"
            missing.append("a GPU: the driver shows none; look at nvidia-smi and at CUDA_VISIBLE_DEVICES")
        elif len(old) == len(found["devices"]):
            missing.append(f"a GPU that is new enough: {'; '.join(old)}")
        else:
            notes += old
    except DeviceNotFoundError as error:
        found["error"] = str(error)
        missing.append(
            "a GPU: install an NVIDIA driver, 525.60.13 (CUDA 12.0) or newer; 580 or newer for the extra cu13. In a "
            "container, start it with --gpus all."
            + ("" if "error" in simulator else " Until then, arrays of the host run on the CPU, in the simulator")
        )
    except TransformerRtcError as error:
        found["error"] = str(error)
        missing.append(f"a driver that works: {error}")
    if not found["devices"] and "error" in simulator:
        missing.append(f"a C++ compiler: {simulator['error']}")
    return found


def _nvrtc(missing: list[str], notes: list[str], driver: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"installed": compiler.installed()}
    try:
        found["used"] = compiler.compiler_identity()
    except TransformerRtcError as error:
        found["error"] = str(error)
        missing.append("NVRTC: pip install 'transformer_rtc[cu12]', or [cu13] for a driver of CUDA 13")
        return found
    if len(found["installed"]) > 1:
        others = "; ".join(found["installed"])
        notes.append(
            f"several NVRTCs are installed, and {found['used']} is used, as cuda-bindings asks for it: {others}"
        )
    major = re.search(r" (\d+)\.|libnvrtc\.so\.(\d+)", found["used"])
    if driver and major and int(driver.split(".")[0]) < int(major[1] or major[2]):
        missing.append(
            f"a driver for NVRTC {major[1] or major[2]}: this one runs CUDA {driver}, and refuses its cubins. Install "
            f"driver 580 or newer, or pip install 'transformer_rtc[cu12]'"
        )
    return found


def _companion(gpus: int, notes: list[str]) -> dict[str, Any] | None:
    """Return what the companion wheel has, by architecture, and how much of it this version asks for on the GPUs."""
    companion = manager.cache.companion
    if companion is None:
        return None
    names = [f"sm_{number}" for number in ARCHITECTURES]
    found: dict[str, Any] = {"folder": companion.folder, "entries": {}, "fitting": {}}
    if companion.folder is None:
        return found
    found["entries"] = {name: companion.count(name) for name in names if companion.count(name)}
    try:
        asked = manifest.read(os.path.join(companion.folder, MANIFEST))
    except ArgumentError as error:
        notes.append(f"transformer-rtc-kernels was built for another version, or is damaged: {error}")
        return found
    for limits in {device_limits(ordinal) for ordinal in range(gpus)}:
        target = Target(limits.architecture)
        sources = {manager.key(spec, target, "") for entry in asked for spec in kernels_of(entry, limits)}
        found["fitting"][str(target)] = sum(companion.get(str(target), source) is not None for source in sources)
    return found


def _cache(missing: list[str]) -> dict[str, Any]:
    cache = manager.cache
    read_only = cache.read_only
    found: dict[str, Any] = {"folder": cache.folder, "read_only_folder": read_only.path if read_only else None}
    if cache.folder is not None:
        found["entries"], found["bytes"] = cache.size()
        found["max_bytes"] = cache.max_bytes
        existing = cache.folder
        while not os.path.exists(existing):
            existing = os.path.dirname(existing)
        reason = cache.refusal()
        if reason:
            missing.append(
                f"a cache: {cache.folder} is not used, as what is in it would run as this user's code: {reason}. "
                f"{ADVICE}"
            )
        elif not os.path.isdir(existing) or not os.access(existing, os.W_OK):
            missing.append(f"a cache: {existing} cannot be written; set TRANSFORMER_RTC_CACHE_DIR to a folder that can")
    if read_only:
        found["read_only_entries"], found["read_only_bytes"] = read_only.size()
        if not os.path.isdir(read_only.path):
            missing.append(f"the read-only cache: there is no folder {read_only.path}")
        elif reason := read_only.refusal():
            missing.append(
                f"the read-only cache: {read_only.path} is not used, as what is in it would run as this user's code: "
                f"{reason}"
            )
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Return what `gather` found for a person to read."""
    told: list[tuple[str, object]] = [
        ("transformer_rtc", f"{found['version']} in {found['folder']}"),
        ("python", f"{found['python']} on {found['platform']}"),
    ]
    driver, nvrtc, cache = found["driver"], found["nvrtc"], found["cache"]
    if "cuda" in driver:
        told.append(("driver", f"runs CUDA {driver['cuda']}"))
    for ordinal, device in enumerate(driver["devices"]):
        largest = device["max_cluster_size"]
        told.append(
            (
                f"cuda:{ordinal}",
                f"{device['name']}, {device['bytes'] / 2**30:.0f} GiB, {device['architecture']}, "
                f"{device['shared_memory_per_cta'] // 1024} KiB of shared memory per CTA, "
                + (f"clusters of up to {largest}" if largest > 1 else "no clusters"),
            )
        )
    if "error" in driver and not any(driver["error"] in what for what in found["missing"]):
        told.append(("driver", driver["error"]))
    told.append(("bindings", f"cuda-bindings {found['bindings']}" if found["bindings"] else "none"))
    told.append(("NVRTC", nvrtc.get("used") or nvrtc["error"]))
    simulator = found["simulator"]
    told.append(
        ("simulator", f"compiles with {simulator['compiler']}" if "compiler" in simulator else simulator["error"])
    )
    modules, size = found["static_kernels"]["modules"], found["static_kernels"]["bytes"]
    none = "none: this build left them out; nothing needs them but TRANSFORMER_RTC_FORCE_STATIC=1"
    told.append(("static kernels", f"{modules} modules, {size / 1024:.0f} KiB" if modules else none))
    if cache["folder"] is None:
        told.append(("disk cache", "off: TRANSFORMER_RTC_CACHE_DIR is empty"))
    else:
        limit = f" of at most {cache['max_bytes'] / 2**20:.0f} MiB" if cache["max_bytes"] else ""
        told.append(
            ("disk cache", f"{cache['folder']}, {cache['entries']} entries, {cache['bytes'] / 1024:.0f} KiB{limit}")
        )
    if cache["read_only_folder"] is not None:
        size = f"{cache['read_only_entries']} entries, {cache['read_only_bytes'] / 1024:.0f} KiB"
        told.append(("read-only cache", f"{cache['read_only_folder']}, {size}"))
    told.append(("companion wheel", _companion_line(found["companion"])))
    told += found["environment"].items()
    told += [("note", note) for note in found["notes"]]
    told += [("missing", what) for what in found["missing"]]
    return [f"{name:16s} {value}" for name, value in told]


def _companion_line(found: dict[str, Any] | None) -> str:
    if found is None:
        return "off: TRANSFORMER_RTC_COMPANION=off"
    if found["folder"] is None:
        return "transformer-rtc-kernels is not installed"
    parts = [f"{count} kernels for {name}" for name, count in found["entries"].items() if count]
    parts += [f"{count} fit this version on {name}" for name, count in found["fitting"].items()]
    return ", ".join([found["folder"], *parts])
