# SPDX-License-Identifier: Apache-2.0
"""The files that a caller's own kernel includes: found by its text, and handed to the compiler by name.

The compiler opens no file, so what it reads is what a key is made of. A file has one name below `_ROOTS`, where no
file can be, and each directive that reaches it is rewritten to that name: the compiler takes a name as it is written,
whichever file includes it, and would look for another name of a header's in the current folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from . import compiler, sources
from .errors import ArgumentError, CompileError, CompilerNotFoundError
from .spec import KernelSpec, Params, TextSpec

__all__ = ["ReadSpec", "check_symbol", "explained", "headers_of", "may_include", "read"]

# By whether there are headers of CUDA's: NVRTC looks for a relative name in the current folder, and the host's compiler
# in one that has only what it was given.
_ROOTS = {True: sources.NOWHERE, False: "included/"}

# Looks for a newline, where "^" would be tried at every character.
_START = r"\n[ \t]*(?:#|%:)[ \t]*"
_INCLUDE = re.compile(rf'({_START}include[ \t]*)("[^"\n]+"|<[^>\n]+>)')
_HAS_INCLUDE = re.compile(r'(\b__has_include[ \t]*\([ \t]*)("[^"\n]+"|<[^>\n]+>)')
_INCLUDE_OF_MACRO = re.compile(rf"{_START}include[ \t]+([A-Za-z_]\w*)")
_DEFINITION = re.compile(rf"{_START}define[ \t]+(\w+)(\(?)[ \t]*([^\n]*)")
_DEFINING_OPTION = re.compile(r"\s*(?:-D|--?define-macro)\s*=?\s*(.*)", re.DOTALL)
_NAME = re.compile(r'("[^"\n]+"|<[^>\n]+>)\s*(?://.*|/\*.*)?')
_ENTRY = re.compile(r"__global__[^;{}]*?\bvoid\s+(\w+)\s*\(")
# What NVRTC, g++ and clang++ say of a file that is not there.
_MISSING = re.compile(
    r"(?:cannot|could not) open source file \"([^\"]+)\"|fatal error: '?(.+?)'?(?:: No such file| file not found)"
)

# What NVIDIA's wheels of the CUDA runtime are called, and where they have the headers, by CUDA's major version.
_RUNTIMES = {
    "12": ("nvidia_cuda_runtime_cu12", "nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include"),
    "13": ("nvidia_cuda_runtime", "'nvidia-cuda-runtime>=13,<14'", "nvidia/cu13/include"),
}
# The headers of those wheels that kernels include, for messages where no wheel is installed.
_OF_CUDA = re.compile(
    r"cuda_\w+\.h(pp)?|cooperative_groups(\.h|/.*)|(vector|device)_\w+\.h|(math_constants|cuComplex)\.h"
)


class _File(NamedTuple):
    """A file, and the folder of those that were searched in which it lies, or from which it was reached."""

    folder: str
    path: str


@dataclass(frozen=True)
class ReadSpec(KernelSpec):
    """A caller's own kernel with the texts of the files that it includes, as they were when it was asked for.

    Parameters
    ----------
    spec : TextSpec
        What was asked for.
    digest : str
        Of the texts; kernels of equal texts are one.
    text : str
        The program, whose directives have the files' names.
    headers : dict of str to str
        The texts by their names, the package's own among them.
    paths : dict of str to str
        Where the files are, by the names.
    """

    spec: TextSpec
    digest: str
    text: str = field(compare=False)
    headers: dict[str, str] = field(compare=False)
    paths: dict[str, str] = field(compare=False)

    @property
    def symbol(self) -> str:
        return self.spec.symbol

    @property
    def params(self) -> Params:
        return self.spec.params

    @property
    def program(self) -> str:
        return self.text

    @property
    def options(self) -> tuple[str, ...]:
        return self.spec.options


def headers_of(spec: KernelSpec) -> dict[str, str]:
    """Return all texts that a kernel's program includes, directly or not, by their names."""
    return spec.headers if isinstance(spec, ReadSpec) else sources.included(spec.program)


def _majors() -> Iterable[str]:
    """Return the major version of CUDA that compiles; where nothing does, what any version has made is right."""
    try:
        return (compiler.bindings_major(),)
    except CompilerNotFoundError:
        return tuple(_RUNTIMES)


def _cuda_folder() -> str | None:
    """Return where the wheel of the CUDA runtime of the compiler's major version has its headers; None: nowhere."""
    for major in _majors():
        distribution, _, below = _RUNTIMES[major]
        for version, folder in compiler.installed_versions(distribution):
            path = os.path.join(folder, below)
            if version.split(".")[0] == major and os.path.isdir(path):
                return path
    return None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the header {path} cannot be read: {error}") from error
    if "\0" in text:
        raise ArgumentError(f"the header {path} has a zero character, so it is no text")
    return text


_read_of_cuda = lru_cache(maxsize=64)(_read_text)  # a wheel's files stay as they are


class _Reader:
    """Follows the directives of texts.

    Parameters
    ----------
    spec : TextSpec
        The kernel.
    of_cuda : bool
        Whether it may include headers of CUDA's.
    """

    def __init__(self, spec: TextSpec, of_cuda: bool) -> None:
        self._symbol = spec.symbol
        self._folders = [os.path.normpath(folder) for folder in spec.include_folders]
        for folder in self._folders:
            if not os.path.isdir(folder):
                raise ArgumentError(f"{spec.symbol}: include_folders has {folder!r}, which is no folder")
        self._cuda = _cuda_folder() if of_cuda else None
        self._root = _ROOTS[of_cuda]
        self._names: dict[str, str] = {}  # by the files' paths
        self._pending: list[tuple[str, _File]] = []
        self.paths: dict[str, str] = {}  # by the files' names
        self.headers: dict[str, str] = {}
        self._by_macro: dict[tuple[str, _File | None], None] = {}  # macros that a directive names, and in which file
        self._definitions: dict[str, dict[str, None]] = {}  # values of macros
        for option in _joined(spec.options):
            match = _DEFINING_OPTION.match(option)
            if match:
                name, _, value = match[1].partition("=")
                self._definitions.setdefault(name.strip(), {})[value.strip()] = None
        self.program = self._followed(spec.program, None)
        while self._pending:
            name, file = self._pending.pop()
            self.headers[name] = self._followed(self._text(file), file)
            if not self._pending:
                self._follow_macros()
        self._follow_macros()

    def _text(self, file: _File) -> str:
        return _read_of_cuda(file.path) if file.folder == self._cuda else _read_text(file.path)

    def _followed(self, text: str, file: _File | None) -> str:
        """Return a text with the names of the files that it includes, which are followed later."""

        def renamed(match: re.Match[str]) -> str:
            name = self._reached(match[2], file)
            return f'{match[1]}"{name}"' if name else match[0]

        if "include" not in text:
            return text
        if file is None or file.folder != self._cuda:
            for name, arguments, value in _DEFINITION.findall(f"\n{text}"):
                self._definitions.setdefault(name, {})[arguments + value] = None
            for name in _INCLUDE_OF_MACRO.findall(f"\n{text}"):
                self._by_macro[name, file] = None
        text = _INCLUDE.sub(renamed, f"\n{text}")[1:]
        return _HAS_INCLUDE.sub(renamed, text) if "__has_include" in text else text

    def _reached(self, written: str, file: _File | None) -> str | None:
        """Return the name of a file that is written in quotes or angles; None where it keeps that, or is not there."""
        name = written[1:-1]
        if os.path.isabs(name):
            return None  # the compiler's check refuses it
        folders = [*self._folders]
        of_cuda = file is not None and file.folder == self._cuda
        if self._cuda is not None:
            folders.insert(0 if of_cuda else len(folders), self._cuda)
        found = [_File(folder, os.path.normpath(os.path.join(folder, name))) for folder in folders]
        if file is not None and written.startswith('"'):
            found.insert(0, _File(file.folder, os.path.normpath(os.path.join(os.path.dirname(file.path), name))))
        for candidate in found:
            # The package's own come before those of CUDA.
            if candidate.folder == self._cuda and not of_cuda and name in sources.texts():
                break
            if os.path.isfile(candidate.path):
                return self._name_of(candidate)
        if name in sources.texts():
            self.headers.update(sources.included(f'#include "{name}"'))
        return None

    def _name_of(self, file: _File) -> str:
        if file.path not in self._names:
            # Independent of where the folder lies: another machine has the same key.
            parts = os.path.relpath(file.path, file.folder).split(os.sep)
            below = "/".join("up" if part == ".." else part for part in parts)
            prefix = f"{self._root}cuda/" if file.folder == self._cuda else self._root
            name, number = prefix + below, 1
            while name in self.paths:
                number += 1
                name = f"{prefix}{number}/{below}"
            self._names[file.path] = name
            self.paths[name] = file.path
            self._pending.append((name, file))
        return self._names[file.path]

    def _follow_macros(self) -> None:
        """Hand over what macros name, by the name that they have."""
        for macro, file in self._by_macro:
            for written in self._values(macro, ()):
                target = self._reached(written, file)
                if target is None:
                    continue
                name, text = written[1:-1], f'#include "{target}"\n'
                if self.headers.setdefault(name, text) != text:
                    raise ArgumentError(f"{self._symbol}: macros name two files {name}; name one in another way")

    def _values(self, macro: str, outer: tuple[str, ...]) -> Iterator[str]:
        """Yield the names in quotes or angles that a macro may have."""
        for value in self._definitions.get(macro, ()):
            match = _NAME.fullmatch(value)
            if match and ".." not in match[1] and not os.path.isabs(match[1][1:-1]):
                yield match[1]
            elif value in self._definitions and value not in outer:
                yield from self._values(value, (*outer, value))
            else:
                raise ArgumentError(
                    f"{self._symbol} includes the macro {macro}, which may be {value or 'empty'}; it takes a name in "
                    f"quotes or angles, without .. and not from the root"
                )


def _joined(options: Iterable[str]) -> Iterator[str]:
    """Yield options, those of two words as one."""
    pending = ""
    for option in options:
        if option.strip() in ("-D", "--define-macro", "-define-macro"):
            pending = option.strip()
        else:
            yield pending + option
            pending = ""


def may_include(spec: KernelSpec) -> bool:
    """Whether a kernel may include files that are not the package's own."""
    return isinstance(spec, TextSpec) and "include" in spec.text


def read(spec: KernelSpec, of_cuda: bool) -> KernelSpec:
    """Return a kernel with the texts of the files that it includes now; the same one where it includes none.

    Parameters
    ----------
    spec : KernelSpec
        The kernel.
    of_cuda : bool
        Whether it may include headers of CUDA's: whether NVRTC compiles it.

    Raises
    ------
    ArgumentError
        If an include folder is none, a file is no text, or a macro names what cannot be followed.
    """
    if not isinstance(spec, TextSpec) or not may_include(spec):
        return spec
    reader = _Reader(spec, of_cuda)
    if not reader.paths and not reader.headers.keys() - sources.included(spec.program).keys():
        return spec
    import hashlib  # opens OpenSSL: not at import

    headers = dict(sorted(reader.headers.items()))
    digest = hashlib.sha256(repr((reader.program, headers)).encode()).hexdigest()
    return ReadSpec(spec, digest, reader.program, headers, reader.paths)


@contextlib.contextmanager
def explained(spec: KernelSpec, of_cuda: bool) -> Iterator[None]:
    """Have what the compiler says name the files as the caller knows them, and say how a missing one is found.

    Raises
    ------
    ArgumentError
        If a header of CUDA's is included in the simulator.
    CompilerNotFoundError
        If a header of CUDA's is included, and the wheel that has it is not installed.
    CompileError
        Of another mistake.
    """
    try:
        yield
    except CompileError as error:
        original = spec.spec if isinstance(spec, ReadSpec) else spec
        if not isinstance(original, TextSpec):
            raise
        log = error.log
        check_symbol(original, _ENTRY.findall(original.text) if _undeclared(original.symbol).search(log) else ())
        match = _MISSING.search(log)
        if match:
            name = match[1] or match[2]
            _refuse_cuda(original.symbol, name, of_cuda)
            folders = ", ".join(original.include_folders) or "none"
            log = f"{log.rstrip()}\n{name} is in no folder that include_folders names; given: {folders}\n"
        for name, path in spec.paths.items() if isinstance(spec, ReadSpec) else ():
            log = log.replace(name, path)
        raise CompileError(error.symbol, error.options, original.program, log, error.versions) from None


def _undeclared(symbol: str) -> re.Pattern[str]:
    """Return what g++ and clang++ say of a name that is not there."""
    return re.compile(rf"\W{symbol}\W+was not declared|undeclared identifier '{symbol}'")


def check_symbol(spec: KernelSpec, entries: Iterable[str]) -> None:
    """Refuse a kernel of a caller's own whose entry is not among those that were found; where none were, do nothing.

    Raises
    ------
    ArgumentError
        If it is not.
    """
    found = list(entries)
    if isinstance(spec, TextSpec | ReadSpec) and found and spec.symbol not in found:
        raise ArgumentError(
            f'the text has no extern "C" __global__ {spec.symbol}; its entries are: {", ".join(found)}'
        ) from None


def _refuse_cuda(symbol: str, name: str, of_cuda: bool) -> None:
    """Say of a missing header of CUDA's how it is had."""
    folder = _cuda_folder()
    if not _OF_CUDA.fullmatch(name) and not (folder and os.path.isfile(os.path.join(folder, name))):
        return
    if not of_cuda:
        raise ArgumentError(
            f"{symbol} includes {name}, and the simulator cannot compile CUDA's headers: leave it out there by "
            f"#ifndef TRTC_SIMULATOR, or run the kernel on a GPU"
        ) from None
    if folder is None:
        major = compiler.bindings_major()
        others = [
            f"{one} {version}" for one, _, _ in _RUNTIMES.values() for version, _ in compiler.installed_versions(one)
        ]
        instead = f"; {', '.join(others)} is installed, which is not for NVRTC {major}" if others else ""
        raise CompilerNotFoundError(
            f"{symbol} includes {name}, a header of CUDA {major}'s runtime, which is not installed{instead}: pip "
            f"install {_RUNTIMES[major][1]}"
        ) from None
