# SPDX-License-Identifier: Apache-2.0
"""What is done when another package is imported, whether that is before or after this one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc takes a fifth of this package's import time, and nobody asks for the base classes
    Loader = MetaPathFinder = object

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call something once a module has been imported: now, if it has.

    What the action raises becomes a warning, as the module's importer did not ask for it.
    """
    if sys.modules.get(name) is not None:  # None forbids the import
        importlib.import_module(name)  # another thread may be in the middle of it
        _act(name, action)
    else:
        _finder.waiting[name] = action
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


def _act(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # a version of the module that has not what the action needs
        warnings.warn(f"transformer_rtc does not work with this {name}: {error!r}", RuntimeWarning, stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds nothing itself: it has the loader of a module that is waited for tell of it."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], object]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.waiting)
                return spec
        return None


class _Loader(Loader):
    """Loads a module by its own loader, and then does what waits for it."""

    def __init__(self, loader: Any, waiting: dict[str, Callable[[], object]]) -> None:
        self._loader, self._waiting = loader, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # a module that is found, and not imported, may be read by its loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # From now on the module has its own loader, which reads its source and its other files.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        action = self._waiting.pop(name, None)
        if action is not None:
            _act(name, action)
        if not self._waiting:
            # A new list: another thread may be walking through this one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not _finder]


_finder = _Finder()
