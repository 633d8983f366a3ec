"""Switching capture on in the demo, as a user's own loop would."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

import upguard_plugin
from upguard_plugin.launch.demo.jobs import Job
from upguard_plugin.launch.demo.model import Trainer
from upguard_plugin.launch.demo.training import Capture, NoCapture


def start_capture(job: Job, trainer: Trainer) -> Capture:
    """A guard on the job's run directory, or none where the job names no directory."""
    if job.output is None:
        return NoCapture()
    guard = upguard_plugin.enable(
        trainer.model,
        trainer.optimizer,
        {"output_dir": job.output, "program": f"demo, fault {job.fault}"},
        layout=_layout(job.layout),
        placements=_parameter_placements(trainer) if job.layout != "dp2" else None,
    )
    _observe_final_gradients(guard, trainer)
    return guard


def _observe_final_gradients(guard: upguard_plugin.Guard, trainer: Trainer) -> None:
    """Record every gradient between the last collective on it and clipping.

    Both are Megatron's own code, and the optimizer sees the gradients only after both.
    """
    config = trainer.gpt.config
    finalize = config.finalize_model_grads_func

    def finalize_and_observe(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        with guard.position.outside_microbatches("grad_sync"):
            for name, parameter in trainer.gpt.named_parameters():
                guard.observe(name, parameter.main_grad, role="main_grad", slot="main_grad")

    config.finalize_model_grads_func = finalize_and_observe


def _layout(layout: str) -> dict[str, Any]:
    if layout == "dp2":
        return {"dp": parallel_state.get_data_parallel_group()}
    return {"tp": parallel_state.get_tensor_model_parallel_group()}


def _parameter_placements(trainer: Trainer) -> dict[str, str]:
    """How Megatron has split each parameter, in UpGuard's words: "o[tp] i", "o i[tp]", "o"."""
    placements = {}
    for name, parameter in trainer.gpt.named_parameters():
        dims = ["o", "i"][: parameter.dim()]
        if getattr(parameter, "tensor_model_parallel", False):
            dims[parameter.partition_dim] += "[tp]"
        placements[name] = " ".join(dims)
    return placements
