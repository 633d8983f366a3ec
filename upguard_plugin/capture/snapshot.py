"""State seen at one moment: parameters, gradients, optimizer state, generators.

In:  named tensors, numbers and bytes that nobody writes while they are read.
Out: their events, all in one phase and outside of micro-batches.

Tensors that share a role and a slot are hashed in one batch: hand them over together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard

NamedTensors = Iterable[tuple[str, Tensor]]


class Snapshot:
    """A context: inside, `tensors` and `value` record what is found now."""

    def __init__(
        self, guard: Guard, phase: str, *, call: int = 0, operator: str | None = None
    ) -> None:
        self.call = call
        self.operator = operator
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
        entries = []
        for boundary, found in named:
            tensor = readable(found)
            if tensor is None:
                self._guard.recorder.note(f"{boundary}: its {slot} has no bytes and is not seen")
                continue
            placement = self._guard.placement(boundary, role, slot, tensor)
            entries.append((boundary, tensor, placement))
        if not self.call:
            self._recorder.record_many(entries, role=role, slot=slot, operator=self.operator)
            return
        for boundary, tensor, placement in entries:
            self._recorder.record(
                boundary, tensor, role=role, slot=slot, operator=self.operator,
                placement=placement, call=self.call,
            )  # fmt: skip

    def value(self, boundary: str, role: str, slot: str, value: Any) -> None:
        """Record a tensor, number, string, bytes or None. Anything else has no value to see."""
        if isinstance(value, Tensor):
            self.tensors(role, slot, [(boundary, value)])
        elif isinstance(value, bool | int | float):
            self._recorder.record_number(
                boundary, value, role=role, slot=slot, call=self.call,
                operator=self.operator,
            )  # fmt: skip
        elif value is None or isinstance(value, str | bytes):
            data = value.encode() if isinstance(value, str) else value or b""
            self._recorder.record_bytes(
                boundary, data, role=role, slot=slot, call=self.call,
                operator=self.operator, dtype="none" if value is None else "uint8",
            )  # fmt: skip


def readable(tensor: Tensor) -> Tensor | None:
    """The tensor to be hashed for `tensor`; None where there are no bytes (meta, quantised).

    A sparse tensor counts by its dense meaning: neither the order nor the repetition of its
    indices is a difference. This makes a dense copy.
    """
    if tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.layout is not torch.strided:
        return tensor.detach().to_dense()
    return tensor
