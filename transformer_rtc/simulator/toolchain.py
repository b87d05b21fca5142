# SPDX-License-Identifier: Apache-2.0
"""A program's text -> a module for this machine's CPU, through the host's C++ compiler."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable

from .. import sources
from ..compiler import Compiled, file_identity
from ..errors import CompileError, CompilerNotFoundError
from ..spec import Target

__all__ = ["compile_program", "compiler_identity", "key_parts", "locate"]

_HERE = os.path.dirname(os.path.realpath(__file__))
_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O1", "-g1", "-w", "-pipe", "-fPIC", "-nostdinc", "-fno-exceptions", "-fno-rtti"),
    # No assumption and no contraction that NVRTC does not make.
    *("-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fsigned-char"),
    *("-fvisibility=hidden", "-fno-threadsafe-statics", "-fno-asynchronous-unwind-tables", "-fno-stack-protector"),
)
# From which version of which compiler on: (is clang, version, checked mode only, flags).
_FLAGS_OF_VERSIONS: tuple[tuple[bool, int, bool, tuple[str, ...]], ...] = (
    # A stack that is too small ends at its guard page; a loop without an end stays one; registers that nobody set hold
    # a pattern, not luck; errors are told without an excerpt, which would be of another line than the text's.
    (False, 8, False, ("-fstack-clash-protection", "-fno-diagnostics-show-caret")),
    (False, 10, False, ("-fno-finite-loops",)),
    (False, 12, False, ("-ftrivial-auto-var-init=pattern",)),
    # Arrays at the end of a struct too.
    (False, 8, True, ("-fsanitize=bounds-strict",)),
    (False, 11, True, ("--param", "tsan-distinguish-volatile=1", "--param", "tsan-instrument-func-entry-exit=0")),
    (True, 11, False, ("-fstack-clash-protection", "-fno-caret-diagnostics", "-ftrivial-auto-var-init=pattern")),
    (True, 12, False, ("-fno-finite-loops",)),
    # Not every addr2line finds the callers in the newer format.
    (True, 11, False, ("-gdwarf-4",)),
    (True, 11, True, ("-mllvm", "-tsan-distinguish-volatile=1", "-mllvm", "-tsan-instrument-func-entry-exit=0")),
)
# The compiler then calls the prelude's hooks at every access; its own run-time library is not linked.
_CHECKED_FLAGS = (
    "-fsanitize=thread",
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow",
    "-fsanitize=return,unreachable",
    "-fno-sanitize-recover=all",
)
# The prelude's memcpy is the kernel's, not the system's.
_LINK_FLAGS = ("-shared", "-nostdlib", "-Wl,-Bsymbolic", "-lm", "-lc")
_X86_64_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}


def _command() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    what = f"CXX is {os.environ['CXX']!r}, which is not found" if given else "neither g++ nor clang++ is on PATH"
    raise CompilerNotFoundError(
        f"to run kernels on the CPU, a C++ compiler must compile them, and {what}: install one (apt install g++), or "
        f"set CXX"
    )


def compiler_identity() -> str:
    """Return which compiler would compile, without running it.

    Raises
    ------
    CompilerNotFoundError
        If there is none.
    """
    command = _command()
    return " ".join([file_identity(command[0]), *command[1:]])


# What is included before a kernel's text: CUDA as the host's compiler sees it.
PRELUDE = ("prelude.h", "cuda_names.h", "interface.h")


@functools.cache
def _prelude() -> dict[str, str]:
    texts = {}
    for name in PRELUDE:
        with open(os.path.join(_HERE, name), encoding="utf-8") as file:
            texts[name] = file.read()
    return texts


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    if platform.machine() != "x86_64":
        return ()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        flags = ""
    # Fused multiply-adds without a call. Not the very processor: other machines may read the same cache.
    return ("-march=x86-64-v3",) if set(flags.split()) >= _X86_64_V3 else ()


@functools.cache
def _version(command: tuple[str, ...]) -> tuple[bool, int, str]:
    """Return whether a compiler is clang, its major version, and its name with its version."""
    text = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.\d[\d.]*", text)
    told = f"{os.path.basename(command[0])} {found[0]}" if found else ""
    return "clang" in text, int(found[1]) if found else 0, told


def _definitions(options: Iterable[str]) -> list[str]:
    """Return those of NVRTC's options that this compiler shares: macros."""
    found = []
    pending = list(options)
    while pending:
        option = pending.pop(0)
        match = re.fullmatch(r"(-D|-U|--define-macro|--undefine-macro)=?\s*(.*)", option)
        if match:
            value = match[2] or (pending.pop(0) if pending else "")
            found.append(("-U" if "U" in match[1] or "undefine" in match[1] else "-D") + value)
    return found


def key_parts(target: Target) -> dict[str, object]:
    """Return what a module depends on besides its program, options and compiler."""
    return {
        "simulated": target.simulated,
        "prelude": _prelude(),
        "flags": [_FLAGS, _FLAGS_OF_VERSIONS, _CHECKED_FLAGS, _LINK_FLAGS, _machine_flags()],
    }


def entries(symbol: str, program: str) -> dict[str, str]:
    """Return a program's entries, those that TRTC_ENTRY marks, else the one named `symbol`, and their launch bounds.

    A bound is the text of its first argument, or the most that a CTA can have.
    """
    names = re.findall(r"^TRTC_ENTRY\b.*\bvoid (\w+)\(", program, re.MULTILINE) or [symbol]
    bounds = {}
    for name in names:
        # An argument of more than names, numbers and products is left alone.
        found = re.search(
            rf"(?:__launch_bounds__|TRTC_LAUNCH_BOUNDS)\s*\(([\w:\s*]+)(?:,[\w:\s*,]*)?\)\s*void\s+{name}\s*\(", program
        )
        bounds[name] = found[1].strip() if found else "1024"
    return bounds


def compile_program(
    symbol: str, program: str, headers: dict[str, str], options: tuple[str, ...], target: Target
) -> Compiled:
    """Compile a program for the simulator.

    Parameters
    ----------
    symbol : str
        The entry's name; where the program marks entries with ``TRTC_ENTRY``, all of those can be run.
    program : str
        CUDA C++, as NVRTC gets it.
    headers : dict of str to str
        What it may include; nothing else is found.
    options : tuple of str
        NVRTC's; those that define macros are used.
    target : Target
        The architecture whose branches are taken, and the mode.

    Raises
    ------
    CompileError
        If the compiler refuses the program.
    CompilerNotFoundError
        If there is none.
    ArgumentError
        If an include names a file by its path.
    """
    sources.check_paths(symbol, (program, *headers.values()))
    command = _command()
    is_clang, version, told = _version(tuple(command))
    checked = target.simulated == "checked"
    flags = [*_FLAGS, *_machine_flags(), f"-D__CUDA_ARCH__={target.architecture}0", f"-DTRTC_CHECKED={int(checked)}"]
    if checked:
        flags += _CHECKED_FLAGS
    for of_clang, first, only_checked, more in _FLAGS_OF_VERSIONS:
        if of_clang == is_clang and version >= first and (checked or not only_checked):
            flags += more
    flags += _definitions(options)
    exports = "".join(f"\nTRTC_EXPORT({entry}, {most})" for entry, most in entries(symbol, program).items())
    with tempfile.TemporaryDirectory(prefix="transformer_rtc.") as folder:
        file = f"{symbol[:200]}.cu"
        # Apart from headers, which may have any of these names.
        prelude = {f"simulator/{name}": text for name, text in _prelude().items()}
        for name, text in {**headers, **prelude, file: f"{program}{exports}\n"}.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
                out.write(text)
        flags += [f"-ffile-prefix-map={folder}/=", "-include", "simulator/prelude.h", "-I", "."]
        # Two steps: told to link, the compiler would add its sanitizers' libraries.
        steps = [*command, *flags, "-c", "-o", "o", file], [*command, "o", *_LINK_FLAGS, "-o", "so"]
        for step in steps:
            done = subprocess.run(step, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode != 0:
                log = done.stderr.replace(folder + "/", "")
                raise CompileError(symbol, tuple(step[len(command) :]), program, log, {command[0]: str(version)})
        with open(os.path.join(folder, "so"), "rb") as made:
            return Compiled(made.read(), "module", "", compiler_identity(), version=told)


def locate(path: str, offsets: Iterable[int]) -> dict[int, list[tuple[str, str, int]]]:
    """Return where offsets in a module's code come from: (function, file, line), from the innermost outwards.

    Parameters
    ----------
    path : str
        Of the module.
    offsets : iterable of int
        Return addresses, from the module's base.
    """
    wanted = list(dict.fromkeys(offsets))
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if not wanted or tool is None:
        return {offset: [] for offset in wanted}
    done = subprocess.run(
        [tool, "-a", "-f", "-i", "-C", "-e", path, *(hex(offset - 1) for offset in wanted)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: dict[int, list[tuple[str, str, int]]] = {offset: [] for offset in wanted}
    offset = 0
    lines = iter(done.stdout.splitlines())
    for line in lines:
        if line.startswith("0x"):
            offset = int(line, 16) + 1
            continue
        match = re.match(r"(.*):(\d+)", next(lines, ""))
        if match:
            found.setdefault(offset, []).append((line, os.path.basename(match[1]), int(match[2])))
    return found
