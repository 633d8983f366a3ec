"""The ledger of what the emulation changed, so that all of it can be put back.

In:  an owner (module, class, mapping), a name, a new value.
Out: `restore()`, after which every owner has exactly the attributes it had before.

The one thing a newcomer gets wrong: `from torch.cuda import manual_seed` makes a copy that no patch
of `torch.cuda` reaches. `follow_copies` gives such copies the new value too, and `restore` finds
those that were made while the patches were in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

# They run on the machine as it is: told that there is a GPU, they would look for its driver.
TRUTHFUL_PACKAGES = frozenset({"torch", "triton", "numba", "upguard_plugin"})

_ABSENT = object()


def wants_truth(module_name: str) -> bool:
    """Whether code of that module must see the machine as it is: torch itself, and UpGuard."""
    return module_name.partition(".")[0] in TRUTHFUL_PACKAGES


def caller_wants_truth() -> bool:
    """`wants_truth` of whoever called the function that asks."""
    return wants_truth(sys._getframe(2).f_globals.get("__name__", ""))


class Patches:
    """Attributes and mapping entries that were replaced, in order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._replaced: list[tuple[Any, Any]] = []  # (original, replacement), of modules only

    def set(self, owner: Any, name: str, value: object, *, follow: bool = True) -> None:
        """Replace or add an attribute of a module, class or instance.

        `follow`: copies of the old value in other modules are replaced too. Not for a value that
        others may hold for reasons of their own.
        """
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if old is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, old))
            if follow and isinstance(owner, ModuleType) and callable(old):
                self._replaced.append((old, value))

    def set_item(self, mapping: MutableMapping[Any, Any], key: object, value: object) -> None:
        """Replace or add an entry of a mapping."""
        old = mapping.get(key, _ABSENT)
        mapping[key] = value
        if old is _ABSENT:
            self._undo.append(lambda: mapping.pop(key, None))
        else:
            self._undo.append(lambda: mapping.__setitem__(key, old))

    def follow_copies(self) -> None:
        """Patch what other modules have taken by `from ... import ...` before now."""
        new = {id(original): value for original, value in self._replaced}
        for module, name, value in _client_attributes():
            if id(value) in new:
                self.set(module, name, new[id(value)])

    def restore(self) -> None:
        """Undo everything, the last change first. A second call does nothing."""
        old = {id(value): original for original, value in reversed(self._replaced)}
        while self._undo:
            self._undo.pop()()
        for module, name, value in _client_attributes():
            if id(value) in old:
                setattr(module, name, old[id(value)])
        self._replaced.clear()


def _client_attributes() -> list[tuple[ModuleType, str, Any]]:
    return [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not wants_truth(module_name)
        for name, value in list(vars(module).items())
        if callable(value)
    ]
