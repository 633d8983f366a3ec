"""How tensors flow between boundaries: who made a tensor, and its gradient on the way back.

In:  the tensors that enter and leave module calls, in forward order.
Out: their events, with the event that made each input; one event per boundary when a tensor's
     gradient arrives, with the call and micro-batch of the forward.

A tensor that leaves one boundary and enters others gets one hook, which takes its gradient's
fingerprint once. Hooks hold names and numbers, never a tensor: they keep no memory alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from upguard_plugin.capture.shield import shielded
from upguard_plugin.trace.batch import NONE

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard
    from upguard_plugin.capture.modules import Call

_OF_GRADIENT = {"input": "grad_input", "output": "grad_output"}


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor at a boundary in forward: where the event of its gradient will belong."""

    boundary: str
    operator: str
    role: str  # grad_input or grad_output
    slot: str
    call: int
    microbatch: int


@dataclass(slots=True)
class Seen:
    """What is known of a tensor object while it lives."""

    tensor: weakref.ref[torch.Tensor]
    writer: int = NONE  # seq of the event that saw it leave a boundary
    version: int = NONE  # when its gradient was hooked
    crossings: list[Crossing] = field(default_factory=list)
    handle: RemovableHandle | None = None


class Flow:
    """The tensors of the current step that crossed a boundary, by object."""

    def __init__(self, guard: Guard) -> None:
        self.recorder = guard.recorder
        self.backward_microbatch = NONE  # of the forward whose gradients are flowing
        self._guard = guard
        self._seen: dict[int, Seen] = {}

    def record(self, call: Call, role: str, slot: str, tensor: torch.Tensor) -> None:
        """Record a tensor at a boundary, and have its gradient recorded when it comes."""
        boundary = call.boundary
        seen = self._seen_of(tensor)
        seq = self.recorder.record(
            boundary.name, tensor, role=role, slot=slot, phase=call.phase,
            operator=boundary.operator, source=boundary.source,
            placement=self._guard.placement(boundary.name, role, slot, tensor),
            call=call.number, microbatch=call.microbatch,
            producer=seen.writer if role == "input" else NONE,
        )  # fmt: skip
        if role == "output":
            seen.writer = seq
        if call.grad and tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            crossing = Crossing(
                boundary.name, boundary.operator, _OF_GRADIENT[role], slot, call.number,
                call.microbatch,
            )  # fmt: skip
            self._watch(tensor, seen, crossing)

    def begin_step(self) -> None:
        """Forget the tensors of the step before."""
        for seen in self._seen.values():
            _release_leaf(seen)
        self._seen.clear()
        self.backward_microbatch = NONE

    def detach(self) -> None:
        """Take all hooks from tensors that still live."""
        for seen in self._seen.values():
            _release(seen)
        self._seen.clear()

    def _seen_of(self, tensor: torch.Tensor) -> Seen:
        seen = self._seen.get(id(tensor))
        if seen is None or seen.tensor() is not tensor:  # an address may be used again
            seen = self._seen[id(tensor)] = Seen(weakref.ref(tensor))
        return seen

    def _watch(self, tensor: torch.Tensor, seen: Seen, crossing: Crossing) -> None:
        version = tensor._version
        if seen.version != version:  # a write in place gives the tensor a new place in the graph
            seen.version = version
            seen.crossings = []
            hook = partial(self._on_gradient, seen.crossings, tensor.is_leaf)
            seen.handle = tensor.register_hook(hook)
        seen.crossings.append(crossing)

    @shielded
    def _on_gradient(
        self, crossings: list[Crossing], is_leaf: bool, grad: torch.Tensor | None
    ) -> None:
        # No return value: anything but None would replace the gradient.
        if not self.recorder.active or not crossings:
            return
        self.backward_microbatch = crossings[-1].microbatch
        self._guard.position.phase = "backward"
        first = NONE
        for crossing in reversed(crossings):  # the consumer passes a gradient before the producer
            first = self._record_gradient(crossing, grad, first)
        if is_leaf:  # the hook stays; the next micro-batch brings its own crossings
            crossings.clear()

    def _record_gradient(self, crossing: Crossing, grad: torch.Tensor | None, same: int) -> int:
        """same: the event that took this very gradient's fingerprint already, or NONE."""
        at = {
            "role": crossing.role, "slot": crossing.slot, "phase": "backward",
            "operator": crossing.operator, "call": crossing.call,
            "microbatch": crossing.microbatch,
        }  # fmt: skip
        if grad is None:
            return self.recorder.record_value(crossing.boundary, None, **at)
        placement = self._guard.placement(crossing.boundary, crossing.role, crossing.slot, grad)
        return self.recorder.record(
            crossing.boundary, grad, placement=placement,
            same_as=same if placement is None else NONE, **at,
        )  # fmt: skip


def _release(seen: Seen) -> None:
    if seen.handle is None:
        return
    seen.handle.remove()
    tensor = seen.tensor()
    # torch leaves an empty dict behind; only a tensor that others still hold can show it.
    if tensor is not None and tensor._backward_hooks is not None and not tensor._backward_hooks:
        tensor._backward_hooks = None


def _release_leaf(seen: Seen) -> None:
    tensor = seen.tensor() if seen.handle is not None else None
    if tensor is not None and tensor.is_leaf:
        _release(seen)
