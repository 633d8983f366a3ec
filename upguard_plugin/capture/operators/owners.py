"""Which parameter an operator of the optimizer, or of clipping, works for.

In:  the optimizers and the names of their parameters. Out: a name for a tensor: that of the
parameter it is, or whose gradient or state it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from upguard_plugin.capture.extents import is_tracked
from upguard_plugin.capture.names import ParameterNames


class Owners:
    """Names by storage, read anew in each step: gradients and state come and go."""

    def __init__(self, names: ParameterNames, optimizers: Iterable[Any]) -> None:
        self._names = names
        self._optimizers = tuple(optimizers)
        # With the storage's weak reference: while it is held, the address is nobody else's.
        self._by_address: dict[int, tuple[str, StorageWeakRef]] | None = None
        self._num_states = 0
        self._last = ""

    def of(self, *values: Any) -> str:
        """The owner of the first tensor that has one; else that of the operator before.

        values: an operator's arguments; tensors are found in lists too.
        """
        owner = self.find(*values)
        if not owner and self._num_states != self._count_states():  # those of a first step
            self._by_address = None
            owner = self.find(*values)
        self._last = owner or self._last
        return self._last

    def find(self, *values: Any) -> str:
        """As `of`; empty where no tensor has an owner."""
        if self._by_address is None:
            self._num_states = self._count_states()
            self._by_address = {
                storage._cdata: (name, StorageWeakRef(storage))
                for storage, name in self._storages()
            }
        return self._first(self._by_address, values)

    def _count_states(self) -> int:
        return sum(len(getattr(optimizer, "state", ())) for optimizer in self._optimizers)

    def _first(self, owners: dict[int, tuple[str, StorageWeakRef]], values: Iterable[Any]) -> str:
        for value in values:
            owner = ""
            if isinstance(value, torch.Tensor):
                if is_tracked(value):
                    owner = owners.get(value.untyped_storage()._cdata, _NOBODY)[0]
            elif isinstance(value, (list, tuple)):
                owner = self._first(owners, value)
            if owner:
                return owner
        return ""

    def forget(self) -> None:
        """To be called when the step ends."""
        self._by_address = None
        self._last = ""

    def _storages(self) -> Iterable[tuple[torch.UntypedStorage, str]]:
        for name, parameter in self._names.parameters.items():
            if parameter.grad is not None:
                yield from _storage(parameter.grad, name)
        for optimizer in self._optimizers:
            for parameter, state in getattr(optimizer, "state", {}).items():
                owner = self._names.of(parameter)
                if owner is not None and isinstance(state, dict):
                    for value in state.values():
                        yield from _storage(value, owner)
        for name, parameter in self._names.parameters.items():
            yield from _storage(parameter, name)


_NOBODY = ("", None)


def _storage(value: object, name: str) -> Iterable[tuple[torch.UntypedStorage, str]]:
    if isinstance(value, torch.Tensor) and is_tracked(value):
        yield value.untyped_storage(), name
