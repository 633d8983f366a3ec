"""The Hugging Face Trainer: a callback that records the training.

    trainer = Trainer(..., callbacks=[UpGuardCallback({"output_dir": "runs/baseline"})])

In:  the Trainer's events: a training begins, a micro-batch or a step is over, the training ends.
Out: a Guard from its begin to its end, told of micro-batches and steps under the Trainer's numbers.

Where DeepSpeed trains, its block records, and this callback says so and does nothing. A loop of
Accelerate is a loop of your own: call `enable` with what `accelerator.prepare` returned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from upguard_plugin.capture.guard import Guard
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.integrations.attach import attach, say
from upguard_plugin.integrations.torch_native.adapter import enable


class UpGuardCallback(TrainerCallback):
    """Records what a Trainer trains."""

    def __init__(
        self,
        config: UpGuardConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """config, options: as `upguard_plugin.enable` takes them.

        Without a `layout` the ranks of a plain data-parallel training form an axis `dp`.
        """
        self._config = config
        self._options = options
        self._microbatch = 0
        self.guard: Guard | None = None  # while a training runs

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "deepspeed", None):
            say("the callback does nothing: DeepSpeed trains, and its config block records it")
            return
        options = {"layout": _layout(args), **self._options}
        model: Any = kwargs.get("model")
        optimizer = kwargs.get("optimizer")
        self.guard = attach(
            lambda: enable(model, optimizer, self._config, **options), "this Trainer"
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin_microbatch(args, 0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin_microbatch(args, self._microbatch + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.guard is not None:
            self.guard.step(iteration=state.global_step - 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.guard is not None:
            self.guard.close()
            self.guard = None

    def _begin_microbatch(self, args: Any, number: int) -> None:
        self._microbatch = number
        if self.guard is not None and args.gradient_accumulation_steps > 1:
            self.guard.microbatch(number)


def _layout(args: Any) -> Mapping[str, int] | None:
    dist = torch.distributed
    if getattr(args, "fsdp", None) or not (dist.is_available() and dist.is_initialized()):
        return None
    return {"dp": dist.get_world_size()}
