"""Hooks on modules: from a forward or backward call to rows of the trace.

In:  modules that are already placed and wrapped, watched through forward (pre-)hooks.
Out: events for inputs, weights in use, outputs, and for the gradients of inputs and outputs.

Gradients come from hooks on the tensors themselves (`flow.py`). Backward hooks on modules
would put identity functions into the graph and forbid in-place changes of outputs: the run would
not be the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from upguard_plugin.capture.boundaries import Boundary, find_boundaries
from upguard_plugin.capture.flow import Flow
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.recompute import RecomputeCalls, Region
from upguard_plugin.capture.rng import look
from upguard_plugin.capture.shield import Hook, out_of_sight, shielded
from upguard_plugin.capture.tensors import Leaves, arguments_in, tensors_in
from upguard_plugin.capture.uncompiled import has_compiled
from upguard_plugin.records import NEVER_FIRED


@dataclass(slots=True)
class Call:
    """A module call that has begun and not ended."""

    boundary: Boundary
    phase: str
    microbatch: int
    number: int
    grad: bool  # whether gradients are on
    region: Region | None  # of activation checkpointing
    handling: bool  # whether the caller was handling an exception when it made the call
    random: dict[str, bytes] = field(default_factory=dict)  # random states as the call began


class ModuleProbe:
    """Watches the modules of all models."""

    def __init__(self, guard: Host) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._position = guard.position
        self._draws_wanted = guard.recorder.wants("rng")
        self._weights = guard.config.weights_in_use if guard.recorder.wants("param") else "off"
        self._flow = Flow(guard)  # gradients, and who made which tensor
        self._recompute = RecomputeCalls()
        self._stack: list[Call] = []
        self._step = -1
        self._in_use: set[tuple[str, str]] = set()  # (boundary, parameter) recorded in this step
        self._undo: list[Callable[[], None]] = []
        self._hooked: list[str] = []  # boundaries to record
        self._called: set[str] = set()  # boundaries whose hooks have run

    def attach(self) -> None:
        """Hook into the models as they are now."""
        boundaries, notes = find_boundaries(self._guard.names, self._guard.config)
        for sentence in notes:
            self.recorder.note(sentence)
        number = free = RemovableHandle.next_id
        for module, boundary in boundaries:
            # The same on all modules: the compiler takes modules that differ in it for different.
            RemovableHandle.next_id = number
            self._hook(module, boundary)
            free = max(free, RemovableHandle.next_id)
        RemovableHandle.next_id = free  # the last module may have taken none
        self._hooked = [
            boundary.name
            for module, boundary in boundaries
            if boundary.recorded and type(module).forward is not nn.Module.forward  # a container
        ]

    def detach(self) -> None:
        """Leave modules and tensors as they were."""
        self._note_unseen()
        while self._undo:
            self._undo.pop()()
        self._flow.detach()
        self._stack.clear()
        self._tell_position()

    def _hook(self, module: nn.Module, boundary: Boundary) -> None:
        before, after = Hook(self._before, boundary), Hook(self._after, boundary)
        compiled = module._compiled_call_impl
        if compiled is not None:
            # Compiled in place: hooks of its own would be compiled with it, so we stand outside.
            module._compiled_call_impl = between(module, before, compiled, after)
            self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))
            return
        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        )
        self._undo.extend(handle.remove for handle in handles)

    @shielded
    def _note_unseen(self) -> None:
        """Say which hooks never ran, where it may be that compiled code passed them by."""
        unseen = [name for name in self._hooked if name not in self._called]
        if unseen and self._position.step and has_compiled():
            more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
            self.recorder.note(
                f"{NEVER_FIRED}hooks in {', '.join(unseen[:3])}{more}: these modules were not "
                "called, or in code only that torch.compile compiled"
            )

    @shielded
    def _before(self, boundary: Boundary, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # No return value: anything but None would replace the arguments.
        self._called.add(boundary.name)
        if not self.recorder.active or out_of_sight(self.recorder):
            return
        call = self._begin(boundary, module)
        self._stack.append(call)
        self._tell_position()
        if not boundary.recorded:
            return
        opaque: set[str] = set()
        self._record(call, "input", arguments_in(args, kwargs, opaque))
        for name in opaque:
            self.recorder.note(f"arguments of class {name} were not recorded")
        if boundary.parameters and self._weights != "off":
            self._record_weights(call, module)
        if boundary.may_draw and self._draws_wanted:
            call.random = look()

    @shielded
    def _after(
        self, boundary: Boundary, module: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> None:
        # No return value: anything but None would replace the output.
        call = self._end(boundary)
        if call is None:
            return
        failed = output is None and not call.handling and sys.exc_info()[1] is not None
        if call.boundary.recorded and self.recorder.active and not failed:
            self._record_draws(call)
            if isinstance(output, torch.Tensor):
                self._record(call, "output", [("0", output)])
            else:
                self._record(call, "output", tensors_in(output, "out"))
        if not self._stack:
            self._leave(call)

    def _begin(self, boundary: Boundary, module: nn.Module) -> Call:
        grad = torch.is_grad_enabled()
        handling = sys.exc_info()[1] is not None
        outer = self._stack[-1] if self._stack else None
        phase = outer.phase if outer else self._enter(boundary, module, grad)
        microbatch = outer.microbatch if outer else self._position.microbatch
        if phase == "recompute":
            microbatch = outer.microbatch if outer else self._position.backward_microbatch
            number = self._recompute.match(boundary.name, microbatch)
            if number is None:
                number = max(self._position.calls[boundary.name, microbatch] - 1, 0)
            return Call(boundary, phase, microbatch, number, grad, None, handling)
        number = self._position.next_call(boundary.name)
        region = self._recompute.region_of((outer.grad, outer.region) if outer else (False, None))
        if region is not None:
            self._recompute.add(boundary.name, microbatch, number, region)
        return Call(boundary, phase, microbatch, number, grad, region, handling)

    def _enter(self, boundary: Boundary, module: nn.Module, grad: bool) -> str:
        """The phase of an outermost call; moves the position there."""
        if torch._C._current_graph_task_id() != -1:
            self._position.phase = "recompute"
            return "recompute"
        self._guard.begin_step_if_needed()
        if self._step != self._position.step:
            self._begin_step()
        self._flow.prune()
        if not module.training or not grad:
            phase = "eval"
        elif boundary.is_loss and self._position.phase == "loss":
            phase = "loss"
        else:
            phase = "forward"
        self._position.phase = phase
        return phase

    def _leave(self, call: Call) -> None:
        """The outermost call has ended: what comes now, until backward begins, is the loss."""
        if call.phase != "eval":
            self._position.phase = "backward" if call.phase == "recompute" else "loss"

    def _begin_step(self) -> None:
        self._step = self._position.step
        self._in_use.clear()
        self._recompute.clear()
        self._flow.begin_step()

    def _end(self, boundary: Boundary) -> Call | None:
        """Take the call off the stack, and all that an exception left above it."""
        stack = self._stack
        for place in range(len(stack) - 1, -1, -1):
            call = stack[place]
            if call.boundary is boundary:
                del stack[place:]
                self._tell_position()
                return call
        return None

    def _tell_position(self) -> None:
        """Say which module call is the innermost one now."""
        position = self._position
        if not self._stack:
            position.module = ""
            return
        call = self._stack[-1]
        position.module, position.module_call = call.boundary.name, call.number
        position.module_microbatch = call.microbatch

    def _record(self, call: Call, role: str, leaves: Leaves) -> None:
        boundary, flow = call.boundary, self._flow
        for slot, leaf in leaves:
            if type(leaf) is torch.Tensor or isinstance(leaf, torch.Tensor):
                flow.record(call, role, slot, leaf)
            else:
                self.recorder.record_value(
                    boundary.name, leaf, role=role, slot=slot, phase=call.phase,
                    operator=boundary.operator, call=call.number, microbatch=call.microbatch,
                )  # fmt: skip

    def _record_draws(self, call: Call) -> None:
        """The random states that a call which drew from them began with: an input of it."""
        now = look() if call.random else {}
        for slot, state in call.random.items():
            if now.get(slot) != state:
                self.recorder.record_bytes(
                    call.boundary.name, state, role="rng", slot=slot, phase=call.phase,
                    operator=call.boundary.operator, call=call.number, microbatch=call.microbatch,
                )  # fmt: skip

    def _record_weights(self, call: Call, module: nn.Module) -> None:
        """The parameters that the module owns, as its forward is about to use them."""
        boundary = call.boundary
        every = self._weights == "all"
        for name, attribute in boundary.parameters:
            parameter = module._parameters.get(attribute)
            use = (boundary.name, name)
            if parameter is None or (use in self._in_use and not every):
                continue
            self._in_use.add(use)
            self.recorder.record(
                name, parameter, role="param", slot="value", phase=call.phase,
                placement=self._guard.placement(name, "param", "value", parameter),
                call=call.number, microbatch=call.microbatch,
            )  # fmt: skip


def between(
    module: nn.Module, before: Callable, compiled: Callable, after: Callable
) -> Callable[..., Any]:
    """What runs a module's forward in a way that passes by its hooks, with two of ours around."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = None
        before(module, args, kwargs)
        try:
            output = compiled(*args, **kwargs)
            return output
        finally:
            after(module, args, kwargs, output)

    return call
