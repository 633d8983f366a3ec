"""Which parameter an operator of the optimizer, or of clipping, works for.

In:  the optimizers and the names of their parameters. Out: a name for a tensor: that of the
parameter it is, or whose gradient or state it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from upguard_plugin.capture.extents import identity_of
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.trace.batch import NONE


class Owners:
    """Names by storage, read anew in each step: gradients and state come and go."""

    def __init__(self, names: ParameterNames, optimizers: Iterable[Any]) -> None:
        self._names = names
        self._optimizers = tuple(optimizers)
        self._by_address: dict[int, str] | None = None
        self._held: list[StorageWeakRef] = []  # while it is, an address is nobody else's
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
            owned = list(self._owned())
            self._held = [StorageWeakRef(tensor.untyped_storage()) for tensor, _ in owned]
            self._by_address = {identity_of(tensor): name for tensor, name in owned}
        return self._first(self._by_address, values) or ""

    def _count_states(self) -> int:
        return sum(len(getattr(optimizer, "state", ())) for optimizer in self._optimizers)

    def _first(self, owners: dict[int, str], values: Iterable[Any]) -> str | None:
        for value in values:
            if isinstance(value, torch.Tensor):
                owner = owners.get(identity_of(value))
            elif isinstance(value, (list, tuple)):
                owner = self._first(owners, value)
            else:
                continue
            if owner is not None:
                return owner
        return None

    def forget(self) -> None:
        """To be called when the step ends."""
        self._by_address = None
        self._held.clear()
        self._last = ""

    def _owned(self) -> Iterable[tuple[torch.Tensor, str]]:
        for name, parameter in self._names.parameters.items():
            if parameter.grad is not None:
                yield from _tracked(parameter.grad, name)
        for optimizer in self._optimizers:
            for parameter, state in getattr(optimizer, "state", {}).items():
                owner = self._names.of(parameter)
                if owner is not None and isinstance(state, dict):
                    for value in state.values():
                        yield from _tracked(value, owner)
        for name, parameter in self._names.parameters.items():
            yield from _tracked(parameter, name)


def _tracked(value: object, name: str) -> Iterable[tuple[torch.Tensor, str]]:
    if isinstance(value, torch.Tensor) and identity_of(value) != NONE:
        yield value, name
