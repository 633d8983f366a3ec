"""A DeepSpeed engine and its guard: micro-batches, steps, the end.

In:  calls of the engine's forward, backward, step, train_batch and destroy.
Out: `Guard.microbatch`, `Guard.step` and `Guard.close`.

`engine.step()` is called for every micro-batch; the optimizer steps at accumulation boundaries.
Which call it was shows afterwards, by the engine's own count of steps: asking beforehand is wrong
where the caller owns the boundary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from upguard_plugin.capture.guard import Guard
from upguard_plugin.integrations.deepspeed.checkpoints import load, save
from upguard_plugin.integrations.wraps import wrap


class Recorded:
    """An engine that is being recorded."""

    def __init__(self, engine: Any, guard: Guard) -> None:
        self.guard = guard
        self._begin_step(engine)

    def _begin_step(self, engine: Any) -> None:
        self._first_micro_step: int = engine.micro_steps
        self._backwards = 0

    def on_forward(self, engine: Any) -> None:
        """A forward is about to run; evaluation has no micro-batches."""
        if engine.pipeline_parallelism or not (engine.training and torch.is_grad_enabled()):
            return  # of a pipeline, `pipeline.ScheduleProbe` knows more
        if engine.gradient_accumulation_steps() > 1:
            self.guard.microbatch(self._microbatch(engine))
        # ZeRO 3 gathers weights before the first module runs.
        self.guard.position.phase = "forward"

    def _microbatch(self, engine: Any) -> int:
        """A forward belongs to the next micro-batch when the last one's backward has begun.

        `loss.backward()` past the engine is not seen; there the engine's count of `step()` calls
        tells.
        """
        return max(self._backwards, int(engine.micro_steps - self._first_micro_step))

    def on_backward(self, loss: Any) -> None:
        """`engine.backward` is about to run."""
        if isinstance(loss, torch.Tensor):
            self.guard.scalar("loss", loss.detach())

    def after_backward(self) -> None:
        """`engine.backward` has run."""
        self._backwards += 1

    def after_step(self, engine: Any, step_before: int, skipped_before: int) -> None:
        """`engine.step` or `train_batch` has run, at a boundary or not."""
        if engine.global_steps == step_before:
            return
        skipped = engine.skipped_steps > skipped_before
        self.guard.step(iteration=step_before, mark="skipped" if skipped else None)
        self._begin_step(engine)


class EngineWraps:
    """The wraps on DeepSpeed's engine classes: there while an engine is recorded, then gone."""

    def __init__(self, engine_class: type, pipeline_class: type | None) -> None:
        self._engine_class = engine_class
        self._pipeline_class = pipeline_class
        self._recorded: weakref.WeakKeyDictionary[Any, Recorded] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._recorded)

    def record(self, engine: Any, guard: Guard) -> None:
        """Tell the guard from now on what this engine does."""
        if not self._undo:
            self._install()
        self._recorded[engine] = Recorded(engine, guard)

    def remove(self) -> None:
        """Take all wraps off. Guards stay open."""
        self._recorded.clear()
        while self._undo:
            self._undo.pop()()

    def _install(self) -> None:
        for name in ("forward", "backward", "step", "destroy"):
            self._undo.append(wrap(self._engine_class, name, getattr(self, f"_{name}")))
        for name, around in (("save_checkpoint", save), ("load_checkpoint", load)):
            if name in vars(self._engine_class):
                self._undo.append(wrap(self._engine_class, name, partial(around, self._guard_of)))
        if self._pipeline_class is not None:
            self._undo.append(wrap(self._pipeline_class, "train_batch", self._step))
            for name in ("_send_tensor_meta", "_recv_tensor_meta"):
                if name in vars(self._pipeline_class):
                    self._undo.append(wrap(self._pipeline_class, name, self._unrecorded))

    def _guard_of(self, engine: Any) -> Guard | None:
        recorded = self._recorded.get(engine)
        return None if recorded is None else recorded.guard

    def _forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kw: Any) -> Any:
        recorded = self._recorded.get(engine)
        if recorded is not None:
            recorded.on_forward(engine)
        return original(engine, *args, **kw)

    def _backward(self, original: Callable[..., Any], engine: Any, *args: Any, **kw: Any) -> Any:
        recorded = self._recorded.get(engine)
        if recorded is not None:
            recorded.on_backward(args[0] if args else kw.get("loss"))
        result = original(engine, *args, **kw)
        if recorded is not None:
            recorded.after_backward()
        return result

    def _unrecorded(self, original: Callable[..., Any], engine: Any, *args: Any) -> Any:
        """Stages tell each other shapes in a buffer of which most is never written.

        Its bits are whatever the memory held: two runs of one program differ in them.
        """
        recorded = self._recorded.get(engine)
        if recorded is None:
            return original(engine, *args)
        recorder = recorded.guard.recorder
        before = recorder.active
        recorder.select(False)
        try:
            return original(engine, *args)
        finally:
            recorder.select(before)

    def _step(self, original: Callable[..., Any], engine: Any, *args: Any, **kw: Any) -> Any:
        recorded = self._recorded.get(engine)
        if recorded is None:
            return original(engine, *args, **kw)
        before = engine.global_steps, engine.skipped_steps
        result = original(engine, *args, **kw)
        recorded.after_step(engine, *before)
        return result

    def _destroy(self, original: Callable[..., Any], engine: Any, *args: Any, **kw: Any) -> Any:
        recorded = self._recorded.pop(engine, None)
        if recorded is not None:
            recorded.guard.close()
            if not self._recorded:
                self.remove()
        return original(engine, *args, **kw)
