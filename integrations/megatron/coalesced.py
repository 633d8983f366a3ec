"""Gradients that are summed over tensor-parallel ranks in one buffer, one by one.

In:  Megatron's finalisation, which copies the gradients of norms, routers and their like into one
     tensor, sums that, and copies the parts back.
Out: for each of them an event in the name of the collective and of its parameter, before the sum. A
     parameter that has lost the mark by which Megatron knows it is then missing by its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from upguard_plugin.capture.extents import address_of
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.shield import shielded
from upguard_plugin.integrations.wraps import wrap
from upguard_plugin.records import Group

FLATTEN = "_flatten_dense_tensors"


class CoalescedProbe:
    """Watches what is put into the buffer."""

    def __init__(self, guard: Guard, finalizer: ModuleType) -> None:
        """finalizer: Megatron's module `finalize_model_grads`, not the function of that name."""
        self.recorder = guard.recorder
        self._guard = guard
        self._finalizer = finalizer
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Stand around the function that fills the buffer. `detach` takes it away."""
        if FLATTEN in vars(self._finalizer):
            self._undo = [wrap(self._finalizer, FLATTEN, self._flatten)]

    def detach(self) -> None:
        """Leave Megatron as it was."""
        while self._undo:
            self._undo.pop()()

    def _flatten(self, original: Callable[..., Any], tensors: Any, *args: Any) -> Any:
        if self._undo:
            self._record(tensors)
        return original(tensors, *args)

    @shielded
    def _record(self, tensors: Sequence[Tensor]) -> None:
        axis = self._guard.layout.axis("tp")
        if axis is None or not self.recorder.active:
            return
        group = Group(axis.name, axis.ranks)
        # All of them are alive now: an address is one tensor's.
        names = {
            address_of(grad): f"{name}.main_grad"
            for name, parameter in self._guard.names.parameters.items()
            if isinstance(grad := getattr(parameter, "main_grad", None), Tensor)
        }
        for tensor in tensors:
            name = names.get(address_of(tensor))
            boundary = f"all_reduce[{group.name}] {name}"
            if name is not None:
                self.recorder.record(
                    boundary, tensor, role="input", moment="launch", op="all_reduce",
                    call=self._guard.position.next_call(boundary), group=group,
                )  # fmt: skip
