"""Call a function when a module has been imported: how an adapter reaches a framework.

In:  a module's name and a callback.
Out: one call of the callback with the module, right after its code has run and before any importer
     sees it; at once where it has been imported already.

Importing the module ourselves would cost seconds in processes that never use it. Three states have
to be told apart: not imported (a finder waits for it), imported, and *being* imported. The last is
the usual one: `import deepspeed` imports torch, which calls us before deepspeed's own code is done.

Loaded at the end of every `import torch`, and at the start of every Python process below
`upguard run`: imports nothing that an interpreter has not loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], object]


def when_imported(name: str, callback: Callback) -> Callable[[], None]:
    """Call `callback(module)` once, when the module of this name has been imported.

    What the callback raises goes to whoever imports the module. A module that runs as `__main__`
    (`python -m name`) is not imported, and a failed import does not count.
    Returns a function that takes the request back; it does nothing after the call.
    """
    module = sys.modules.get(name)
    if module is None:
        return _Finder(name, callback).install()
    if _initializing(getattr(module, "__spec__", None)):
        return _await_initialized(module, callback)
    callback(module)
    return lambda: None


def _initializing(spec: object) -> bool:
    """Whether the module's code is running now; the import system's own mark."""
    return getattr(spec, "_initializing", False)


class _Finder:
    """Finds nothing itself: asks the finders behind it, and has their loader call back."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name = name
        self._callback = callback

    def install(self) -> Callable[[], None]:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        return self.remove

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        # Only finders behind this one: two requests for one module would ask each other for ever.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # type: ignore[arg-type]
        for finder in behind:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        # Built-in and frozen modules share a class as their loader, namespace packages run no code.
        if isinstance(loader, type) or not hasattr(loader, "exec_module"):
            return
        before = vars(loader).get("exec_module")

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if before is not None:
                loader.exec_module = before
            loader.exec_module(module)
            self.remove()
            self._callback(module)

        loader.exec_module = exec_module


def _await_initialized(module: ModuleType, callback: Callback) -> Callable[[], None]:
    """Wait for the first look at a module whose code is running now.

    Its loader is at work and cannot be wrapped any more. Whoever imports a module looks an
    attribute up in it before using it, so its class is replaced until that happens.
    """
    kept = type(module)

    def restore() -> None:
        if type(module) is Awaited:
            module.__class__ = kept  # type: ignore[assignment]

    class Awaited(kept):  # type: ignore[misc, valid-type]
        def __getattribute__(self, attribute: str) -> Any:
            read = super().__getattribute__
            # Dunder names are read by the import system itself, before the import is over.
            if not attribute.startswith("__") and not _initializing(read("__spec__")):
                restore()
                callback(self)
                return getattr(self, attribute)
            return read(attribute)

    module.__class__ = Awaited
    return restore
