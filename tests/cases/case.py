"""A case: a public bug report as a recipe, and the answer that the tool must give.

A case file defines `CASE`. Its `train` function runs one training with the public API and says by
its `variant` what is on: "baseline", "target" (the fault) or "twin" (the target's code, fault off).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner

from upguard_plugin.cli import upguard

Train = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Case:
    """train(variant, config) runs one training; config is what `enable` is to be given."""

    number: int
    report: str  # where the public report is
    symptom: str
    train: Train
    answer: Mapping[str, Any] | None  # fields of the first divergence; None: identical
    level: str = "module"
    same_program: bool = False  # a self-replay: both runs are one program
    command: str = "compare"  # or "check": the target alone
    also: Mapping[str, Any] = field(default_factory=dict)  # what else the verdict must hold


def seed_all(seed: int = 0) -> None:
    """Every generator that a run is recorded with."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def record(case: Case, variant: str, output: Path) -> Path:
    """Train one variant of a case, recorded."""
    program = "same" if case.same_program else {"twin": "baseline"}.get(variant, variant)
    seed_all()
    config = {"output_dir": str(output), "level": case.level, "program": program}
    case.train(variant, config)
    return output


def verdict_of(*arguments: str) -> dict[str, Any]:
    """What a command of `upguard` says, as JSON."""
    result = CliRunner().invoke(upguard, [*arguments, "--format", "json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)
