# SPDX-License-Identifier: Apache-2.0
"""The files that a caller's own kernel includes: found by its text, and handed to the compiler by name.

The compiler opens no file, so what it reads is what a key is made of. A file has one name below `_ROOTS`, where no
file can be, and each directive that reaches it is rewritten to that name: the compiler takes a name as it is written,
whichever file includes it, and would look for another name of a header's in the current folder. A directive that cannot
be followed is rewritten to a name of no file, so that it is an error only where the compiler comes to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from . import cuda_headers, directives, sources
from .errors import ArgumentError, CompileError
from .spec import KernelSpec, Params, TextSpec

__all__ = ["ReadSpec", "check_symbol", "explained", "headers_of", "may_include", "read"]

# By whether there are headers of CUDA's: NVRTC looks for a relative name in the current folder, and the host's compiler
# in one that has only what it was given. Apart from the program, which a header may be named as.
_ROOTS = {True: f"{sources.NOWHERE}included/", False: "included/"}
_MISSING_ROOT = f"{sources.NOWHERE}missing/"
_REFUSED_ROOT = f"{sources.NOWHERE}refused/"

_DEFINING_OPTION = re.compile(r"\s*(?:-D|--?define-macro)\s*=?\s*(.*)", re.DOTALL)
_NAME = re.compile(r'"[^"\n]+"|<[^>\n]+>')
_ENTRY = re.compile(r"__global__[^;{}]*?\bvoid\s+(\w+)\s*\(")
# What NVRTC, g++ and clang++ say of a file that is not there.
_MISSING = re.compile(
    r"(?:cannot|could not) open source file \"([^\"]+)\"|fatal error: '?(.+?)'?(?:: No such file| file not found)"
)
_MOST_KEPT = 64
_RACY_SECONDS = 1.0  # a file that was changed so shortly before may change again without a new time


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
        Where the files are, by the names; of those that are missing, what the caller calls them.
    refused : dict of str to str
        What is wrong with directives that cannot be followed, by the names that they have now.
    """

    spec: TextSpec
    digest: str
    text: str = field(compare=False)
    headers: dict[str, str] = field(compare=False)
    paths: dict[str, str] = field(compare=False)
    refused: dict[str, str] = field(compare=False)

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


_Identity = tuple[int, int, int, int] | None


def _identity(path: str) -> _Identity:
    """Return what tells a file from another of the same path; None where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    is_file = (status.st_mode & 0o170000) == 0o100000
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) if is_file else None


class _Reader:
    """Follows the directives of texts.

    Parameters
    ----------
    spec : TextSpec
        The kernel.
    of_cuda : tuple of str
        The folders of CUDA's headers that it may include.
    root : str
        What the names of files begin with.
    """

    def __init__(self, spec: TextSpec, of_cuda: tuple[str, ...], root: str) -> None:
        self._symbol = spec.symbol
        self._folders = [os.path.normpath(folder) for folder in spec.include_folders]
        for folder in self._folders:
            if not os.path.isdir(folder):
                raise ArgumentError(f"{spec.symbol}: include_folders has {folder!r}, which is no folder")
        self._cuda = of_cuda
        self._root = root
        self._names: dict[str, str] = {}  # by the files' real paths
        self._pending: list[tuple[str, _File]] = []
        self.seen: dict[str, _Identity] = {}  # each path that was looked for
        self.paths: dict[str, str] = {}  # by the files' names
        self.headers: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._by_macro: dict[tuple[str, _File | None], str] = {}  # macros that a directive names, where, and as what
        self._definitions: dict[str, dict[str, None]] = {}  # values of macros
        for option in _joined(spec.options):
            match = _DEFINING_OPTION.match(option)
            if match:
                name, _, value = match[1].partition("=")
                self._definitions.setdefault(name.strip(), {})[value.strip()] = None
        self.program = self._followed(spec.program, None)
        self._drain()
        while self._follow_macros():
            self._drain()
        self._refuse_macros()

    def _drain(self) -> None:
        while self._pending:
            name, file = self._pending.pop()
            try:
                text = _read_text(file.path)
            except ArgumentError as error:
                text = f'#include "{self._refuse(name, str(error))}"\n'
            self.headers[name] = self._followed(text, file)

    def _refuse(self, name: str, why: str) -> str:
        """Return the name by which a directive is an error where the compiler comes to it."""
        refused = _REFUSED_ROOT + name.removeprefix(sources.NOWHERE)
        self.refused[refused] = why
        return refused

    def _followed(self, text: str, file: _File | None) -> str:
        """Return a text with the names of the files that it includes, which are followed later."""

        def renamed(match: re.Match[str]) -> str:
            name = self._reached(match[2], file) or self._missing(match[2])
            return f'{match[1]}"{name}"' if name else match[0]

        if not directives.may_include(text):
            return text
        if file is None or file.folder not in self._cuda:
            for name, arguments, value in directives.DEFINITION.findall(f"\n{text}"):
                self._definitions.setdefault(name, {})[arguments + directives.value_of(value)] = None
            for _, name in directives.INCLUDE_OF_MACRO.findall(f"\n{text}"):
                self._by_macro.setdefault((name, file), "")
        text = directives.INCLUDE.sub(renamed, f"\n{text}")[1:]
        return directives.HAS_INCLUDE.sub(renamed, text) if "__has_" in text else text

    def _missing(self, written: str) -> str | None:
        """Return what to call a file that is not there, where the compiler would find it beside what it was given."""
        name = written[1:-1]
        if os.path.isabs(name) or ".." not in name.split("/"):
            return None  # by its path: the compiler's check refuses it
        missing = _MISSING_ROOT + "/".join("up" if part == ".." else part for part in name.split("/"))
        self.paths[missing] = name
        return missing

    def _reached(self, written: str, file: _File | None) -> str | None:
        """Return the name of a file that is written in quotes or angles; None where it keeps that, or is not there."""
        name = written[1:-1]
        if os.path.isabs(name):
            return None  # the compiler's check refuses it
        of_cuda = file is not None and file.folder in self._cuda
        folders = [*self._cuda, *self._folders] if of_cuda else [*self._folders, *self._cuda]
        found = [_File(folder, os.path.normpath(os.path.join(folder, name))) for folder in folders]
        if file is not None and written.startswith('"'):
            found.insert(0, _File(file.folder, os.path.normpath(os.path.join(os.path.dirname(file.path), name))))
        for candidate in found:
            # The package's own come before those of CUDA.
            if candidate.folder in self._cuda and not of_cuda and name in sources.texts():
                break
            if candidate.path not in self.seen:
                self.seen[candidate.path] = _identity(candidate.path)
            if self.seen[candidate.path] is not None:
                return self._name_of(candidate)
        if name in sources.texts():
            self.headers.update(sources.included(f'#include "{name}"'))
        return None

    def _name_of(self, file: _File) -> str:
        real = os.path.realpath(file.path)
        if real not in self._names:
            # Independent of where the folder lies: another machine has the same key.
            parts = os.path.relpath(file.path, file.folder).split(os.sep)
            below = "/".join("up" if part == ".." else part for part in parts)
            prefix = f"{self._root}cuda/" if file.folder in self._cuda else self._root
            name, number = prefix + below, 1
            while name in self.paths:
                number += 1
                name = f"{prefix}{number}/{below}"
            self._names[real] = name
            self.paths[name] = file.path
            self._pending.append((name, file))
        return self._names[real]

    def _follow_macros(self) -> bool:
        """Hand over what macros name, by the name that they have; return whether that reached more files."""
        for (macro, file), refused in list(self._by_macro.items()):
            for written in () if refused else self._values(macro, ()):
                target = self._reached(written, file) if _is_name(written) else None
                name, text = written[1:-1], f'#include "{target}"\n'
                if target is not None and name == f"{self._symbol}.cu":
                    why = (
                        f"{self._symbol}: a macro names a header as the program is named, {name}; call it another name"
                    )
                    self._by_macro[macro, file] = self._refuse(f"{macro}/{name}", why)
                    break
                if target is not None and self.headers.setdefault(name, text) != text:
                    why = f"{self._symbol}: macros name two files {name}; name one in another way"
                    self._by_macro[macro, file] = self._refuse(f"{macro}/{name}", why)
        return bool(self._pending)

    def _refuse_macros(self) -> None:
        """Have macros that cannot be followed be errors."""
        for (macro, file), refused in self._by_macro.items():
            wrong = next((value for value in self._values(macro, ()) if not _is_name(value)), None)
            if wrong is not None:
                why = (
                    f"{self._symbol} includes the macro {macro}, which may be {wrong or 'empty'}; it takes a name in "
                    f"quotes or angles, without .. and not from the root"
                )
                refused = self._refuse(macro, why)
            if not refused:
                continue
            at = None if file is None else self._names[os.path.realpath(file.path)]
            text = "\n" + (self.program if at is None else self.headers[at])

            def renamed(match: re.Match[str], macro: str = macro, refused: str = refused) -> str:
                return f'{match[1]}"{refused}"' if match[2] == macro else match[0]

            text = directives.INCLUDE_OF_MACRO.sub(renamed, text)[1:]
            if at is None:
                self.program = text
            else:
                self.headers[at] = text

    def _values(self, macro: str, outer: tuple[str, ...]) -> Iterator[str]:
        """Yield what a macro may be, where that is no other macro."""
        for value in self._definitions.get(macro, ()):
            if value in self._definitions and value not in outer:
                yield from self._values(value, (*outer, value))
            else:
                yield value


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the header {path} cannot be read: {error}") from error
    if "\0" in text:
        raise ArgumentError(f"the header {path} has a zero character, so it is no text")
    return text


def _is_name(value: str) -> bool:
    """Whether a macro's value is a name that can be followed."""
    return _NAME.fullmatch(value) is not None and ".." not in value and not os.path.isabs(value[1:-1])


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
    return isinstance(spec, TextSpec) and directives.may_include(spec.text)


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
        If an include folder is none.
    """
    if not isinstance(spec, TextSpec) or not may_include(spec):
        return spec
    folders = cuda_headers.folders() if of_cuda else ()
    found = _kept.get((spec, of_cuda, folders))
    if found is not None and all(map(os.path.isdir, spec.include_folders)):
        seen, kernel = found
        if all(_identity(path) == identity for path, identity in seen.items()):
            return kernel
    now = time.time()
    reader = _Reader(spec, folders, _ROOTS[of_cuda])
    kernel = _kernel_of(spec, reader)
    newest = max((max(identity[1:3]) for identity in reader.seen.values() if identity is not None), default=0)
    if newest * 1e-9 < now - _RACY_SECONDS:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[spec, of_cuda, folders] = (reader.seen, kernel)
    return kernel


# What was followed last, with each path that was looked for then.
_kept: dict[tuple[TextSpec, bool, tuple[str, ...]], tuple[dict[str, _Identity], KernelSpec]] = {}


def _kernel_of(spec: TextSpec, reader: _Reader) -> KernelSpec:
    followed = reader.paths or reader.refused or reader.headers.keys() - sources.included(spec.program).keys()
    if not followed:
        return spec
    import hashlib  # opens OpenSSL: not at import

    headers = dict(sorted(reader.headers.items()))
    digest = hashlib.sha256(repr((reader.program, headers)).encode()).hexdigest()
    return ReadSpec(spec, digest, reader.program, headers, reader.paths, reader.refused)


@contextlib.contextmanager
def explained(spec: KernelSpec, of_cuda: bool) -> Iterator[None]:
    """Have what the compiler says name the files as the caller knows them, and say how a missing one is found.

    Raises
    ------
    ArgumentError
        If a header of CUDA's is included in the simulator, a file is no text, or a macro names what cannot be followed.
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
        paths, refused, texts = {}, {}, [original.text]
        if isinstance(spec, ReadSpec):
            paths, refused = spec.paths, spec.refused
            texts += [text for name, text in spec.headers.items() if name in paths]
        log = error.log
        for name in sorted(refused, key=len, reverse=True):
            if name in log:
                raise ArgumentError(refused[name]) from None
        if _undeclared(original.symbol).search(log):
            check_symbol(original, [entry for text in texts for entry in _ENTRY.findall(text)])
        if paths:
            # The longest first: a name may begin with another one.
            names = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
            log = re.sub(rf"(?:\./)?({names})", lambda match: paths[match[1]], log)
        match = _MISSING.search(log)
        if match:
            name = match[1] or match[2]
            told = cuda_headers.refuse(original.symbol, name, of_cuda)
            folders = ", ".join(original.include_folders) or "none"
            log = f"{log.rstrip()}\n{name} is in no folder that include_folders names; given: {folders}\n{told}"
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
