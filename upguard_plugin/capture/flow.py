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

from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import shielded
from upguard_plugin.trace.batch import NONE

if TYPE_CHECKING:
    from upguard_plugin.capture.boundaries import Boundary
    from upguard_plugin.capture.modules import Call
    from upguard_plugin.records import Placement

FIRST_LIMIT = 4096  # tensors to remember before those that are gone are looked for

_OF_GRADIENT = {"input": "grad_input", "output": "grad_output"}


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor at a boundary in forward: where the event of its gradient will belong."""

    boundary: Boundary
    role: str  # grad_input or grad_output
    slot: str
    call: int
    microbatch: int


@dataclass(slots=True)
class Seen:
    """What is known of a tensor object while it lives."""

    tensor: weakref.ref[torch.Tensor]
    writer: int = NONE  # seq of the event that saw it leave a boundary first, as it is now
    written: int = NONE  # its version then
    version: int = NONE  # when its gradient was hooked
    crossings: list[Crossing] = field(default_factory=list)
    handle: RemovableHandle | None = None


class Flow:
    """The tensors of the current step that crossed a boundary, by object."""

    def __init__(self, guard: Host) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._by_sample = guard.config.samples
        self._seen: dict[int, Seen] = {}
        self._limit = FIRST_LIMIT
        self._kinds: dict[tuple, tuple[int, Placement | None]] = {}

    def record(self, call: Call, role: str, slot: str, tensor: torch.Tensor) -> None:
        """Record a tensor at a boundary, and have its gradient recorded when it comes."""
        boundary = call.boundary
        if tensor.is_nested:  # it has no shape
            self.recorder.note(f"a nested tensor of {boundary.name} was not recorded")
            return
        seen = self._seen_of(tensor)
        producer = seen.writer if role == "input" else NONE
        place = (call.microbatch, call.number, producer)
        seq = NONE
        if self._by_sample:
            seq = self._record_samples(boundary, call.phase, role, slot, tensor, place)
        if seq == NONE:
            key, placement = self._kind_of(boundary, call.phase, role, slot, tensor)
            seq = self.recorder.record_as(key, tensor, placement, *place)
        if role == "output":
            version = NONE if tensor.is_inference() else tensor._version  # those do not count
            if version == NONE or seen.written != version:
                seen.writer, seen.written = seq, version
        if call.grad and tensor.requires_grad and not (tensor.is_leaf and _is_parameter(tensor)):
            role = _OF_GRADIENT[role]
            crossing = Crossing(boundary, role, slot, call.number, call.microbatch)
            self._watch(tensor, seen, crossing)

    def _kind_of(
        self, boundary: Boundary, phase: str, role: str, slot: str, tensor: torch.Tensor
    ) -> tuple[int, Placement | None]:
        """The recorder's key for such a tensor there, and its placement."""
        kind = (boundary.name, phase, role, slot, tensor.dtype, tensor.shape)
        known = self._kinds.get(kind)
        if known is None:
            placement = self._guard.placement(boundary.name, role, slot, tensor)
            key = self.recorder.key_of(
                boundary.name, tensor, role=role, slot=slot, phase=phase,
                operator=boundary.operator, placement=placement, source=boundary.source,
            )  # fmt: skip
            known = self._kinds[kind] = (key, placement)
        return known

    def _record_samples(
        self, boundary: Boundary, phase: str, role: str, slot: str, tensor: torch.Tensor,
        place: tuple[int, int, int],
    ) -> int:  # fmt: skip
        """Record each sample of a tensor as if it stood alone; NONE where samples are not known.

        place: micro-batch, call and producer. Returns the seq of the last one.
        """
        cut = self._guard.placements.of_samples(boundary.name, role, slot, tensor.shape)
        if cut is None or type(tensor) is not torch.Tensor:
            return NONE
        seq, (dim, placement) = NONE, cut
        if self._guard.batches.num_samples not in (None, tensor.shape[dim]):
            return NONE  # what it counts are no samples of the micro-batch
        with torch._C._DisableTorchDispatch():  # for no mode to see
            samples = tensor.detach().unbind(dim)
        for i, sample in enumerate(samples):
            key = self.recorder.key_of(
                boundary.name, sample, role=role, slot=f"{slot}[{i}]", phase=phase,
                operator=boundary.operator, placement=placement, source=boundary.source,
            )  # fmt: skip
            seq = self.recorder.record_as(key, sample, placement, *place)
        return seq

    def begin_step(self) -> None:
        """Forget the tensors of the step before."""
        for seen in self._seen.values():
            _release_leaf(seen)
        self._seen.clear()

    def prune(self) -> None:
        """Forget tensors that are gone, where many have been: an evaluation may be long."""
        if len(self._seen) > self._limit:
            self._seen = {key: s for key, s in self._seen.items() if s.tensor() is not None}
            self._limit = max(FIRST_LIMIT, 2 * len(self._seen))

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
            hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saved without it
            seen.handle = tensor.register_hook(hook)
        seen.crossings.append(crossing)

    @shielded
    def _on_gradient(
        self, crossings: list[Crossing], is_leaf: bool, grad: torch.Tensor | None
    ) -> None:
        # No return value: anything but None would replace the gradient.
        if not self.recorder.active or not crossings:
            return
        self._guard.position.backward_microbatch = crossings[-1].microbatch
        self._guard.position.phase = "backward"
        same, placed = NONE, None
        for crossing in reversed(crossings):  # the consumer passes a gradient before the producer
            if grad is None:
                self._record_missing(crossing)
                continue
            kind = (crossing.boundary, "backward", crossing.role, crossing.slot)
            place = (crossing.microbatch, crossing.call, NONE)
            if self._by_sample and self._record_samples(*kind, grad, place) != NONE:
                continue
            key, placement = self._kind_of(*kind, grad)
            same = self.recorder.record_as(
                key, grad, placement, crossing.microbatch, crossing.call,
                same_as=same if placement is placed else NONE,
            )  # fmt: skip
            placed = placement
        if is_leaf:  # the hook stays; the next micro-batch brings its own crossings
            crossings.clear()

    def _record_missing(self, crossing: Crossing) -> None:
        boundary = crossing.boundary
        self.recorder.record_value(
            boundary.name, None, role=crossing.role, slot=crossing.slot, phase="backward",
            operator=boundary.operator, call=crossing.call, microbatch=crossing.microbatch,
        )  # fmt: skip


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Parameters' gradients are recorded where they are accumulated."""
    return isinstance(tensor, torch.nn.Parameter)


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
