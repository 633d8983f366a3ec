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
        self._by_address: dict[int, str] = {}
        self._held: list[StorageWeakRef] = []  # while it is, an address is nobody else's
        self._num_states = NONE  # when they were read; NONE: not in this step
        self._last = ""

    def of(self, values: Iterable[Any]) -> str:
        """The owner of the first tensor that has one; else that of the operator before.

        values: an operator's arguments; tensors are found in lists too.
        """
        self._last = self.find(values) or self._last
        return self._last

    def find(self, values: Iterable[Any]) -> str:
        """As `of`; empty where no tensor has an owner."""
        owner = self._first(values)
        if not owner and self._num_states != self._count_states():  # a first step makes them
            self._read()
            owner = self._first(values)
        return owner

    def forget(self) -> None:
        """To be called when the step ends."""
        self._by_address.clear()
        self._held.clear()
        self._num_states = NONE
        self._last = ""

    def _first(self, values: Iterable[Any]) -> str:
        owners = self._by_address
        for value in values:
            if isinstance(value, torch.Tensor):
                owner = owners.get(identity_of(value))
            elif isinstance(value, (list, tuple)):
                owner = self._first(value)
            else:
                continue
            if owner:
                return owner
        return ""

    def _count_states(self) -> int:
        count = 0
        for optimizer in self._optimizers:
            count += len(getattr(optimizer, "state", ()))
        return count

    def _read(self) -> None:
        self._num_states = self._count_states()
        owned = list(self._owned())
        self._held = [StorageWeakRef(tensor.untyped_storage()) for tensor, _ in owned]
        self._by_address = {identity_of(tensor): name for tensor, name in owned}

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
