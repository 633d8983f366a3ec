"""Megatron's schedules: which micro-batch an event belongs to, forward and backward.

In:  calls of `forward_step` and `backward_step`, of which all schedules are made: without pipeline,
     1F1B, and interleaved.
Out: the position of a guard, moved before each of them; the loss; gradients once they are final.

A backward step is told by the tensor it starts from: it left the forward step of the same
micro-batch and chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.padding import keep_freed
from upguard_plugin.capture.shield import shielded
from upguard_plugin.integrations.wraps import wrap

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class ScheduleProbe:
    """Watches the steps that schedules are made of."""

    def __init__(
        self,
        guard: Guard,
        schedules: ModuleType,
        on_final_gradients: Callable[[], None],
        on_batch_size: Callable[[int], None],
    ) -> None:
        """on_final_gradients: called after each `finalize_model_grads_func`, in its phase.

        on_batch_size: told the samples of a micro-batch before each schedule.
        """
        self.recorder = guard.recorder
        self._guard = guard
        self._schedules = schedules
        self._on_final_gradients = on_final_gradients
        self._on_batch_size = on_batch_size
        self._signature = inspect.signature(schedules.forward_step)
        self._microbatches = WeakTensorKeyDictionary()  # output of a forward step -> its number
        self._trained = -1  # the step in which a schedule has begun to train
        self._finalizers: list[tuple[Any, Any, Any]] = []  # (config, original, ours)
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Replace the functions. `detach` puts them back."""
        around = {name: self._schedule for name in SCHEDULES if hasattr(self._schedules, name)}
        around |= {"forward_step": self._forward_step, "backward_step": self._backward_step}
        self._undo = [wrap(self._schedules, name, each) for name, each in around.items()]

    def detach(self) -> None:
        """Leave Megatron as it was."""
        while self._undo:
            self._undo.pop()()
        while self._finalizers:
            config, original, ours = self._finalizers.pop()
            if config.finalize_model_grads_func is ours:
                config.finalize_model_grads_func = original

    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._undo:
            self._begin(bool(kwargs.get("forward_only")), kwargs.get("micro_batch_size"))
        return original(*args, **kwargs)

    @shielded
    def _begin(self, forward_only: bool, batch_size: int | None) -> None:
        """Record the state that is found, before a stage receives what others computed."""
        if batch_size is not None:
            self._on_batch_size(batch_size)
        self._guard.begin_step_if_needed()
        position = self._guard.position
        position.phase = "eval" if forward_only else "forward"
        if forward_only:
            return
        if self._trained == position.step:  # Megatron repeats a step to tell a fault from chance
            self._guard.mark = "rerun"
        self._trained = position.step

    def _forward_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = self._before_forward(args, kwargs) if self._undo else None
        result = original(*args, **kwargs)
        if number is not None:
            self._after_forward(number, result)
        return result

    def _backward_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._undo:
            self._before_backward(args[1] if len(args) > 1 else kwargs.get("output_tensor"))
        return original(*args, **kwargs)

    @shielded
    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        given = self._signature.bind(*args, **kwargs).arguments
        self._watch_finalizer(given["config"])
        number = given.get("current_microbatch")
        if number is None:
            self.recorder.note("a schedule does not number its micro-batches")
            return None
        self._guard.microbatch(number)
        return int(number)

    @shielded
    def _after_forward(self, number: int, result: Any) -> None:
        for output in _tensors(result[0]):
            self._microbatches[output] = number
            if output.dim() == 0:  # only a loss has no dims; other stages give activations
                self._guard.scalar("loss", output)

    @shielded
    def _before_backward(self, output: Any) -> None:
        storages = self.recorder.storages
        if storages is not None:
            # A stage frees what it has sent and keeps the graph. The last one scales what is left
            # of its loss, which nobody reads.
            for freed in _tensors(output):
                keep_freed(storages, freed)
        numbers = {self._microbatches.pop(t) for t in _tensors(output) if t in self._microbatches}
        if len(numbers) != 1:
            self.recorder.note("a backward step began from a tensor of no known micro-batch")
            return
        number = numbers.pop()
        self._guard.microbatch(number)
        self._guard.position.backward_microbatch = number
        self._guard.position.phase = "backward"

    def _watch_finalizer(self, config: Any) -> None:
        """Stand around what finalises gradients; programs set it anew before they train."""
        finalize = getattr(config, "finalize_model_grads_func", None)
        if finalize is None or any(finalize is ours for _, _, ours in self._finalizers):
            return

        def finalize_and_record(*args: Any, **kwargs: Any) -> Any:
            with self._guard.position.outside_microbatches("grad_sync"):
                result = finalize(*args, **kwargs)
                self._on_final_gradients()
            return result

        config.finalize_model_grads_func = finalize_and_record
        self._finalizers.append((config, finalize, finalize_and_record))


def _tensors(output: Any) -> list[torch.Tensor]:
    outputs = output if isinstance(output, list) else [output]
    return [tensor for tensor in outputs if isinstance(tensor, torch.Tensor)]
