"""A pipeline engine's schedule: which micro-batch an event belongs to, receives and sends too.

In:  the instructions that a PipelineEngine executes, one by one.
Out: the position of a guard, moved before each of them; batches on the stages that load them; the
     loss where the last stage computes it.

Each kind of instruction is executed once per micro-batch, in their order; between kinds schedules
interleave. So the n-th receive belongs to micro-batch n, whatever ran last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.shield import shielded

# Instructions of one micro-batch -> the phase in which they run.
_PHASES = {
    "LoadMicroBatch": "data",
    "RecvActivation": "forward",
    "ForwardPass": "forward",
    "SendActivation": "forward",
    "RecvGrad": "backward",
    "BackwardPass": "backward",
    "SendGrad": "backward",
}
_REDUCTIONS = ("ReduceGrads", "ReduceTiedGrads")  # once a step


class ScheduleProbe:
    """Watches the instructions of one engine."""

    def __init__(self, guard: Guard, engine: Any) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._engine = engine
        self._step = -1
        self._counts: Counter[str] = Counter()  # instructions of each kind, in this step

    def attach(self) -> None:
        """Give this engine its own table of instructions. `detach` takes it away."""
        table = type(self._engine)._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {
            command: self._watched(command.__name__, function)
            for command, function in table.items()
        }
        # Later stages receive activations, which are no batch.
        self._guard.batches.from_inputs = False

    def detach(self) -> None:
        """Leave the engine as it was."""
        vars(self._engine).pop("_INSTRUCTION_MAP", None)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def execute(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._before(name)
            result = function(engine, *args, **kwargs)
            self._after(name, kwargs.get("buffer_id", args[0] if args else None))
            return result

        return execute

    @shielded
    def _before(self, name: str) -> None:
        if not self._engine.module.training:
            return
        position = self._guard.position
        if name in _REDUCTIONS:
            position.microbatch = position.backward_microbatch = -1
            position.phase = "grad_sync"
        if name not in _PHASES:
            return
        self._guard.begin_step_if_needed()
        if self._step != position.step:
            self._step = position.step
            self._counts.clear()
        if self._engine.gradient_accumulation_steps() > 1:
            self._guard.microbatch(self._counts[name])
        self._counts[name] += 1
        position.phase = _PHASES[name]
        if position.phase == "backward":
            position.backward_microbatch = position.microbatch

    @shielded
    def _after(self, name: str, buffer: Any) -> None:
        engine = self._engine
        if not engine.module.training or buffer is None:
            return
        if name == "LoadMicroBatch":
            for kind, here in (
                ("inputs", engine.is_first_stage()),
                ("labels", engine.is_last_stage()),
            ):
                if here and engine.pipe_buffers[kind][buffer] is not None:
                    self._guard.data(kind, engine.pipe_buffers[kind][buffer])
        elif (
            name == "ForwardPass"
            and engine.is_last_stage()
            and isinstance(engine.loss, torch.Tensor)
        ):
            self._guard.scalar("loss", engine.loss.detach())
