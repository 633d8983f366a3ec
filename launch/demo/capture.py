"""Switching capture on in the demo, as a user's own loop would."""

from __future__ import annotations

from upguard_plugin.integrations.megatron import attach
from upguard_plugin.launch.demo.jobs import Job
from upguard_plugin.launch.demo.model import Trainer
from upguard_plugin.launch.demo.training import Capture, NoCapture


def start_capture(job: Job, trainer: Trainer) -> Capture:
    """A guard on the job's run directory, or none where the job names no directory."""
    if job.output is None:
        return NoCapture()
    program = f"demo, fault {job.fault}"
    settings = {"output_dir": job.output, "program": program, "level": job.level}
    return attach(trainer.model, trainer.optimizer, settings)
