"""The demo's training loop: Megatron's schedule over two micro-batches a step.

In:  a job. Out: an outcome, and the run directory if the job names one.

A fault is active in one step of the target only, from when its batches have been read until the
optimizer is done; capture sees what follows from it, never the fault.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from upguard_plugin.launch.demo.faults import FAULT_STEP, FAULTS
from upguard_plugin.launch.demo.jobs import NUM_MICROBATCHES, NUM_STEPS, Job, Outcome
from upguard_plugin.launch.demo.model import SEQUENCE_LENGTH, Trainer, build_trainer
from upguard_plugin.launch.demo.text import Batch, Text

_SAMPLES_PER_MICROBATCH = 2


class Capture(Protocol):
    """The part of `Guard` that a training loop calls."""

    def microbatch(self, k: int) -> None: ...
    def data(self, name: str, tensor: torch.Tensor, batch_dim: int = 0) -> None: ...
    def scalar(self, name: str, value: float) -> None: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


class NoCapture:
    """Training without UpGuard."""

    def microbatch(self, k: int) -> None: ...
    def data(self, name: str, tensor: torch.Tensor, batch_dim: int = 0) -> None: ...
    def scalar(self, name: str, value: float) -> None: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Training:
    """One training on this rank; what a fault may touch."""

    trainer: Trainer
    text: Text
    rank: int
    batches: list[Batch] = field(default_factory=list)  # of the current step

    def read_batches(self, step: int) -> None:
        """The step's micro-batches of this rank's data-parallel replica."""
        replicas = parallel_state.get_data_parallel_world_size()
        first = step * NUM_MICROBATCHES * replicas + parallel_state.get_data_parallel_rank()
        self.batches = [
            self.text.batch(first + k * replicas, _SAMPLES_PER_MICROBATCH)
            for k in range(NUM_MICROBATCHES)
        ]


def run_job(job: Job, start_capture: Callable[[Job, Trainer], Capture]) -> Outcome:
    """Train as the job says. Every rank of the default process group must call it."""
    started_s = time.perf_counter()
    trainer = build_trainer(job.layout)
    training = Training(trainer, Text(SEQUENCE_LENGTH), torch.distributed.get_rank())
    capture = start_capture(job, trainer)
    losses = []
    for step in range(NUM_STEPS):
        training.read_batches(step)
        fault = FAULTS[job.fault].plant(training) if step == FAULT_STEP else nullcontext()
        with fault:
            losses.append(_train_step(training, capture))
        capture.step()
    capture.close()
    return Outcome(_digest(trainer), tuple(losses), time.perf_counter() - started_s)


def _train_step(training: Training, capture: Capture) -> float:
    trainer = training.trainer
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, capture),
        data_iterator=iter(enumerate(training.batches)),
        model=[trainer.model],
        num_microbatches=NUM_MICROBATCHES,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=_SAMPLES_PER_MICROBATCH,
    )
    _, grad_norm, _ = trainer.optimizer.step()
    trainer.scheduler.step(increment=1)
    loss = sum(report["loss"].item() for report in reports) / len(reports)
    capture.scalar("loss", loss)
    capture.scalar("grad_norm", float(grad_norm))
    return loss


def _forward_step(
    capture: Capture, batches: Iterator[tuple[int, Batch]], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    k, batch = next(batches)
    capture.microbatch(k)
    capture.data("tokens", batch.tokens)
    capture.data("labels", batch.labels)
    position_ids = torch.arange(SEQUENCE_LENGTH, device="cuda").expand_as(batch.tokens)
    causal = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, device="cuda").tril() < 0.5
    return model(batch.tokens, position_ids, causal, labels=batch.labels), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    # The schedule divides the loss in place by the number of micro-batches.
    return loss, {"loss": loss.detach().clone()}


def _digest(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        for tensor in (parameter, getattr(parameter, "main_param", parameter)):
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
