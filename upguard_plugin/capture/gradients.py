"""Gradients: each time one is added to its parameter, and as the optimizer will use them.

In:  leaf parameters, named; the moments at which `optimizers` and `clipping` call.
Out: phase `accumulate`: the gradient before (where there is one) and after each accumulation, per
     micro-batch. Phases `grad_sync` and `clip`: all gradients of a step, complete.

A gradient that was accumulated in this step and is gone at the next accumulation is recorded as
None before it: somebody cleared it in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from upguard_plugin.capture.contents import name_whole
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot, readable
from upguard_plugin.records import Placement
from upguard_plugin.trace.batch import NONE

NamedParameter = tuple[str, Tensor]


class GradientProbe:
    """Watches the gradients of parameters."""

    def __init__(self, guard: Host) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        # At level stage gradients are seen in the collectives that sum them, and nowhere else.
        self._is_off = guard.config.level == "stage"
        self._is_wanted = any(map(guard.recorder.wants, ("grad", "main_grad")))
        self._hooks: dict[int, tuple[weakref.ref[Tensor], list[RemovableHandle]]] = {}
        self._step = -1
        self._accumulated: set[str] = set()  # parameters, in this step
        self._partial: dict[tuple[Placement, tuple[str, ...]], Placement] = {}
        self._complete = False  # gradients were recorded since the last accumulation
        # What an adapter knows of gradients that a step finds: the part that is valid here.
        self.main_grads_at_rest: Callable[[Sequence[NamedParameter]], list[tuple[str, Tensor]]] = (
            _main_grads_of
        )

    def watch(self, parameters: Iterable[NamedParameter]) -> None:
        """Attach to trainable parameters that are not watched yet; forget those that are gone."""
        # Of several ranks, gradients are named for the buffers that reduce them.
        if self._is_off or not (self._is_wanted or _is_distributed()):
            return
        for key in [key for key, (ref, _) in self._hooks.items() if ref() is None]:
            del self._hooks[key]
        for name, parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._hooks:
                self._watch_one(name, parameter)

    def detach(self) -> None:
        """Leave every parameter as it was."""
        for ref, handles in self._hooks.values():
            for handle in handles:
                handle.remove()
            parameter = ref()
            # torch leaves an empty dict behind, which shows on the parameter.
            if parameter is not None and not parameter._backward_hooks:
                parameter._backward_hooks = None  # type: ignore[assignment]
            if parameter is not None and not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._hooks.clear()

    def record_start(self, now: Snapshot, parameters: Sequence[NamedParameter]) -> None:
        """Record the gradients that are there before the step has made any."""
        if self._is_off:
            return
        now.tensors("grad", "grad", _grads_of(parameters))
        now.tensors("main_grad", "main_grad", self.main_grads_at_rest(parameters))

    def record_complete(
        self,
        parameters: Sequence[NamedParameter],
        *,
        role: str = "grad",
        operator: str | None = None,
    ) -> None:
        """Record gradients to which this step adds no more; a missing one is recorded as None.

        The first time after the last accumulation of a distributed run they are those that the
        ranks have agreed on (`grad_sync`); what changes them later is unscale and clip. operator:
        what has just changed them. Call n is the n-th such look in the step.
        """
        grads = [(name, p.grad) for name, p in parameters if _is_expected(p)]
        self.record_parts(grads, role=role, operator=operator)

    def record_parts(
        self,
        grads: Sequence[tuple[str, Tensor | None]],
        *,
        role: str,
        operator: str | None = None,
    ) -> None:
        """As `record_complete`, with the gradients themselves."""
        if self._is_off:
            return
        phase = "clip" if self._complete or not _is_distributed() else "grad_sync"
        with Snapshot(self._guard, phase, operator=operator) as now:
            first = grads[0][0] if grads else ""
            now.call = self._guard.position.next_call(f"{role} {first} complete after {operator}")
            now.tensors(role, role, [(name, g) for name, g in grads if g is not None])
            for name, grad in grads:
                if grad is None:
                    now.value(name, role, role, None)

    def mark_complete(self) -> None:
        """From now until the next accumulation, gradients are only unscaled and clipped."""
        self._complete = True

    @property
    def complete(self) -> bool:
        """Whether gradients were recorded since the last accumulation."""
        return self._complete

    def _watch_one(self, name: str, parameter: Tensor) -> None:
        # The hooks hold no reference to the parameter: it must die when the model drops it.
        ref = weakref.ref(parameter)
        before = partial(self._before, name, ref)
        before.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning on save
        after = partial(self._after, name)
        handles = [
            parameter.register_hook(before),
            parameter.register_post_accumulate_grad_hook(after),
        ]
        self._hooks[id(parameter)] = (ref, handles)

    @shielded
    def _before(self, name: str, ref: weakref.ref[Tensor], _grad: Tensor) -> None:
        parameter = ref()
        if parameter is None or not self.recorder.active:
            return
        position = self._guard.position
        if self._step != position.step:
            self._step = position.step
            self._accumulated.clear()
        microbatch = self._microbatch()
        call = position.calls[name, microbatch]
        if parameter.grad is not None:
            self._record(name, "grad", parameter.grad, "before", call)
        elif name in self._accumulated and not hasattr(parameter, "main_grad"):
            self.recorder.record_bytes(
                name, b"", role="grad", slot="grad", dtype="none", phase="accumulate",
                moment="before", call=call, microbatch=microbatch,
            )  # fmt: skip

    @shielded
    def _after(self, name: str, parameter: Tensor) -> None:
        if not self.recorder.active:
            return
        self._complete = False
        self._accumulated.add(name)
        calls, place = self._guard.position.calls, (name, self._microbatch())
        call = calls[place]
        calls[place] = call + 1
        main_grad = getattr(parameter, "main_grad", None)
        # Where a kernel has added to `main_grad` itself, `.grad` is a dummy without a value.
        fused = main_grad is not None and getattr(parameter, "grad_added_to_main_grad", False)
        if parameter.grad is not None and not fused:
            self._record(name, "grad", parameter.grad, None, call)
        if isinstance(main_grad, Tensor):
            # Read before the framework adds to it: afterwards its reduction may be under way.
            moment = "after" if fused else "before"
            self._record(name, "main_grad", main_grad, moment, call)

    def _microbatch(self) -> int:
        """Of the forward that the gradients come from: schedules interleave micro-batches."""
        position = self._guard.position
        flowing = position.backward_microbatch
        return position.microbatch if flowing == NONE else flowing

    def _record(self, name: str, role: str, grad: Tensor, moment: str | None, call: int) -> None:
        tensor = readable(grad)
        self.recorder.record(
            name, tensor, role=role, slot=role, phase="accumulate", moment=moment, call=call,
            microbatch=self._microbatch(),
            placement=self._partial_placement(name, role, tensor),
        )  # fmt: skip
        if self.recorder.storages is not None and _is_distributed():
            name_whole(self.recorder.storages, tensor, f"{name}.{role}")

    def _partial_placement(self, name: str, role: str, tensor: Tensor) -> Placement | None:
        """The placement of a gradient that the ranks have not summed yet."""
        placement = self._guard.placement(name, role, role, tensor)
        if placement is None:
            return None
        taken = placement.sharded + placement.partial
        found = [
            self._guard.layout.axis(axis, placement.mesh)
            for axis in self._guard.placements.unreduced(name)
            if axis not in taken
        ]
        axes = tuple(axis.name for axis in found if axis is not None and axis.size > 1)
        if not axes:
            return placement
        # One object per placement: the recorder tells placements apart by identity.
        if (placement, axes) not in self._partial:
            partial = replace(placement, partial=(*placement.partial, *axes))
            self._partial[placement, axes] = partial
        return self._partial[placement, axes]


def _is_expected(parameter: Tensor) -> bool:
    return parameter.grad is not None or parameter.requires_grad


def _grads_of(parameters: Iterable[NamedParameter]) -> list[tuple[str, Tensor]]:
    """Gradients but those that are `main_grad` by another name."""
    return [
        (name, p.grad)
        for name, p in parameters
        if p.grad is not None and p.grad is not getattr(p, "main_grad", None)
    ]


def _main_grads_of(parameters: Iterable[NamedParameter]) -> list[tuple[str, Tensor]]:
    grads = [(name, getattr(p, "main_grad", None)) for name, p in parameters]
    return [(name, grad) for name, grad in grads if isinstance(grad, Tensor)]


def _is_distributed() -> bool:
    dist: Any = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
