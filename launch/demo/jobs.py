"""What the parent process and its two workers say to each other, as JSON. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Tensor-parallel size of the two ranks, and whether norms work on parts of the sequence.
LAYOUTS = {"tp2": (2, False), "tp2-sp": (2, True), "dp2": (1, False)}
NUM_RANKS = 2
NUM_STEPS = 4
NUM_MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run."""

    fault: str  # a name of FAULTS
    layout: str  # a key of LAYOUTS
    output: str | None = None  # the run directory; None trains without capture
    level: str = "module"  # of capture


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank says of a finished job."""

    weights: str  # SHA-256 of all weights and fp32 masters, in order
    losses: tuple[float, ...]  # one of each step, mean over its micro-batches
    seconds: float


def write_jobs(path: Path, jobs: Sequence[Job]) -> None:
    """Hand jobs to the workers."""
    path.write_text(json.dumps([asdict(job) for job in jobs]))


def read_jobs(path: Path) -> list[Job]:
    """The jobs that `write_jobs` wrote."""
    return [Job(**entry) for entry in json.loads(path.read_text())]


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Hand a rank's outcomes back, in the order of the jobs."""
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


def read_outcomes(path: Path) -> list[Outcome]:
    """The outcomes that `write_outcomes` wrote."""
    return [
        Outcome(entry["weights"], tuple(entry["losses"]), entry["seconds"])
        for entry in json.loads(path.read_text())
    ]
