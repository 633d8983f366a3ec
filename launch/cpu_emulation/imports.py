"""Run a function right after a module was imported, before anyone can copy its names.

In:  exact module names and what to do with each module.
Out: an object for `sys.meta_path`; removing it from there undoes everything.

A module that is loaded already does not pass here: whoever registers a function calls it himself.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AfterImport = Callable[[ModuleType], None]
DuringImport = Callable[[], AbstractContextManager[None]]


class PostImportFinder(MetaPathFinder):
    """Finds nothing by itself: asks the other finders and wraps the loader they give."""

    def __init__(
        self, after: Mapping[str, AfterImport], during: Mapping[str, DuringImport] | None = None
    ) -> None:
        self._after = dict(after)
        self._during = dict(during or {})
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of the named modules, with a loader that calls back; else None."""
        wanted = fullname in self._after or fullname in self._during
        if not wanted or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader, fullname)
        return spec

    def _wrap(self, loader: Loader, fullname: str) -> None:
        real = loader.exec_module

        @functools.wraps(real)
        def exec_module(module: ModuleType) -> None:
            # The loader stays on the module as __loader__: leave it as it was found.
            del loader.exec_module
            with self._during.get(fullname, nullcontext)():
                real(module)
            if fullname in self._after:
                self._after[fullname](module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
