"""A case: a public bug report as a recipe, and the answer that the tool must give.

A case file defines `CASE`. Its `train` function runs one training with the public API and says by
its `variant` what is on: "baseline", "target" (the fault) or "twin" (the target's code, fault off);
where `whole` has an answer, also "whole" (the twin on one rank). With `num_ranks` it runs on each
rank of one gloo job.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
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
    whole: Mapping[str, Any] | None = None  # the same against variant "whole", on one rank
    level: str = "module"
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of what `enable` is given
    num_ranks: int = 1
    baseline_ranks: int | None = None  # where the baseline has another layout
    twin_of: str = "baseline"  # the variant that equals the twin
    same_program: bool = False  # a self-replay: both runs are one program
    also: Mapping[str, Any] = field(default_factory=dict)  # what else the verdict must hold
    broken: Mapping[str, Any] | None = None  # what `upguard check` of the target alone must name
    breaks_nothing: bool = False  # `upguard check` of the target alone finds nothing
    equal: tuple[tuple[str, ...], ...] = ()  # options of `upguard compare` that find no difference
    then: Mapping[str, Any] = field(default_factory=dict)  # the first that the difference reaches
    unreached: tuple[str, ...] = ()  # what a difference does not reach, see `reached`
    checked_with_more: bool = False  # checked alone is another recording, variant "..._checked"

    @property
    def options(self) -> tuple[str, ...]:
        """Of `upguard compare`: pairs across layouts are of the exact model."""
        return () if self.baseline_ranks is None else ("--exact",)

    @property
    def is_across_layouts(self) -> bool:
        return self.whole is not None or self.baseline_ranks is not None

    def ranks_of(self, variant: str) -> int:
        """How many ranks train a variant."""
        whole = {"whole": 1, "baseline": self.baseline_ranks}
        return whole.get(variant) or self.num_ranks

    def checked(self, variant: str) -> str:
        """The variant whose recording `upguard check` is given."""
        return f"{variant}_checked" if self.checked_with_more else variant

    @property
    def module(self) -> str:
        """Where the case is defined: processes of a job find it by this name."""
        return self.train.__module__


def seed_all(seed: int = 0) -> None:
    """Every generator that a run is recorded with."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def record(case: Case, variant: str, output: Path) -> Path:
    """Train one variant of a case, recorded, in this process."""
    is_faulty = variant in ("target", "target_checked")
    program = "same" if case.same_program else "target" if is_faulty else "baseline"
    seed_all()
    config = {"output_dir": str(output), "level": case.level, "program": program, **case.settings}
    case.train(variant, config | ({"samples": True} if case.is_across_layouts else {}))
    return output


def train_one(module: str, variant: str, output: str) -> None:
    """Train one variant of the case that a module defines, recorded, on this rank."""
    record(import_module(module).CASE, variant, Path(output))


def verdict_of(baseline: Path, target: Path, *options: str) -> dict[str, Any]:
    """What `upguard compare` says of two runs."""
    return _run("compare", str(baseline), str(target), *options)


def check_of(run: Path) -> dict[str, Any]:
    """What `upguard check` says of one run."""
    return _run("check", str(run))


def grade(case: Case, verdict: Mapping[str, Any]) -> dict[str, bool]:
    """Right or wrong, for each field that the answer names."""
    if case.answer is None:
        grades = {"verdict": first_is(verdict, None)}
    else:
        first = verdict["first_divergence"] or {}
        grades = {name: _holds(first.get(name), value) for name, value in case.answer.items()}
    if case.then:
        behind = verdict["spread"][0]["boundaries"][1:2]
        grades["then"] = bool(behind) and _holds(behind[0], case.then)
    if case.unreached:
        grades["unreached"] = not reached(verdict, case.unreached)
    return grades | {name: _holds(verdict[name], value) for name, value in case.also.items()}


def reached(verdict: Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    """What of a divergence's step differs although it must not: "phase boundary role slot" by glob.

    A verdict lists the first boundaries behind the divergence, all of them where they are few.
    """
    first = verdict["first_divergence"]
    links = [link for spread in verdict["spread"] for link in spread["boundaries"]]
    named = [first, *verdict["concurrent"], *links]
    texts = [f"{at['phase']} {at['boundary']} {at['role']} {at['slot']}" for at in named if at]
    return [text for text in texts if any(fnmatchcase(text, pattern) for pattern in patterns)]


def first_is(verdict: Mapping[str, Any], answer: Mapping[str, Any] | None) -> bool:
    """Whether the first divergence has all fields of an answer; None asks for identical runs."""
    if answer is None:
        return verdict["verdict"] == "identical"
    return verdict["first_divergence"] is not None and _holds(verdict["first_divergence"], answer)


def all_equal(case: Case, baseline: Path, target: Path) -> bool:
    """Whether what the answer calls equal is, by comparisons of nothing else."""
    verdicts = (verdict_of(baseline, target, *case.options, *some) for some in case.equal)
    return all(verdict["verdict"] == "identical" for verdict in verdicts)


def grade_check(case: Case, check: Mapping[str, Any]) -> dict[str, bool]:
    """Right or wrong, for each field of what must be broken first in the target."""
    if case.breaks_nothing:
        return {"broken": not check["broken"]}
    assert case.broken is not None
    first = (check["broken"] or [{}])[0]
    return {name: _holds(first.get(name), value) for name, value in case.broken.items()}


def _run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(upguard, [*arguments, "--format", "json"])
    assert result.exit_code in (0, 1, 3), result.output
    return json.loads(result.output)


def _holds(found: Any, wanted: Any) -> bool:
    """Of records, only the fields that are wanted count."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return all(_holds(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(_holds, found, wanted))
    return found == wanted
