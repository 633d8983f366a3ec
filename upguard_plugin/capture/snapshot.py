"""State seen at one moment: parameters, gradients, optimizer state, generators.

In:  named tensors, numbers and bytes that nobody writes while they are read.
Out: their events, all in one phase and outside of micro-batches.

Tensors that share a role and a slot are hashed in one batch: hand them over together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from upguard_plugin.capture.probe import Host

NamedTensors = Iterable[tuple[str, Tensor]]


class Snapshot:
    """A context: inside, `tensors` and `value` record what is found now."""

    def __init__(
        self, guard: Host, phase: str, *, call: int = 0, operator: str | None = None
    ) -> None:
        self.call = call
        self.operator = operator
        self.moment: str | None = None
        self._guard = guard
        self._recorder = guard.recorder
        self._place = guard.position.outside_microbatches(phase)

    def __enter__(self) -> Snapshot:
        self._place.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._place.__exit__(*error)

    def tensors(self, role: str, slot: str, named: NamedTensors) -> None:
        """Record tensors of any shape and dtype that share their role and slot."""
        if not self._recorder.wants(role):
            return
        entries = []
        for boundary, found in named:
            tensor = readable(found)
            placement = self._guard.placement(boundary, role, slot, tensor)
            entries.append((boundary, tensor, placement))
        if not self.call and self.moment is None:
            self._recorder.record_many(entries, role=role, slot=slot, operator=self.operator)
            return
        for boundary, tensor, placement in entries:
            self._recorder.record(
                boundary, tensor, role=role, slot=slot, operator=self.operator,
                placement=placement, call=self.call, moment=self.moment,
            )  # fmt: skip

    def value(self, boundary: str, role: str, slot: str, value: Any) -> None:
        """Record a tensor, number, text, bytes or None."""
        if isinstance(value, Tensor):
            self.tensors(role, slot, [(boundary, value)])
            return
        self._recorder.record_value(
            boundary, value, role=role, slot=slot, call=self.call, operator=self.operator,
            moment=self.moment,
        )  # fmt: skip


def readable(tensor: Tensor) -> Tensor:
    """The tensor to be hashed for `tensor`: itself, or the dense meaning of a sparse one.

    Neither the order nor the repetition of sparse indices is a difference. Makes a dense copy.
    """
    if tensor.layout is torch.strided:
        return tensor
    with torch._C._DisableTorchDispatch():  # none of the training's operators
        sparse = tensor.detach()
        # Repeated indices are summed by `coalesce` first: `to_dense` sums them in another order.
        return (sparse.coalesce() if sparse.layout is torch.sparse_coo else sparse).to_dense()
