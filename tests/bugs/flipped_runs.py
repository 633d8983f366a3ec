"""Runs of the GPT in which results of operators are corrupted, and what the verdict must name.

Where to corrupt is drawn from the trace of the clean run: the phase first, then the operator, then
the tensor, so that what is rare is drawn too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.bugs.faults import CorruptedCalls, Corruption
from tests.bugs.training import compare, record
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import NONE
from upguard_plugin.trace.reader import open_trace

PHASES = (("forward", "loss"), ("backward",), ("optimizer",))
TRAINING = frozenset(phase for phases in PHASES for phase in phases)
FIELDS = ("step", "microbatch", "phase", "boundary", "operator", "call", "role", "slot", "moment")


@dataclass(frozen=True)
class Result:
    """A tensor that an operator returned or wrote, as the trace has it."""

    step: int
    microbatch: int | None
    key: EventKey
    call: int
    nth: int  # of the operator's calls in the run

    @property
    def place(self) -> dict[str, Any]:
        """What the verdict must say of it."""
        own = {"step": self.step, "microbatch": self.microbatch, "call": self.call}
        return {field: own[field] if field in own else getattr(self.key, field) for field in FIELDS}


def results_of(run: Path, phases: frozenset[str] = TRAINING) -> list[Result]:
    """What torch's operators returned or wrote in these phases, in program order."""
    trace = open_trace(run)
    found: list[Result] = []
    calls: Counter[str] = Counter()
    current, slots = "", set()
    for entry in trace.steps(0):
        batch = trace.read(0, entry.step)
        for row in range(len(batch)):
            key = batch.key_of(row)
            if key.role != "output" or not (key.operator or "").startswith("aten."):
                continue  # a module's, or not an operator's
            if key.operator != current or key.slot in slots:  # a tensor is written once a call
                current, slots = key.operator, set()
                calls[current] += 1
            slots.add(key.slot)
            if key.phase in phases:
                microbatch = None if batch.microbatch[row] == NONE else int(batch.microbatch[row])
                nth = calls[current] - 1
                found.append(Result(entry.step, microbatch, key, int(batch.call[row]), nth))
    return found


def drawn(results: Iterable[Result], draw: random.Random, how: str) -> Result:
    """One of the results that can be corrupted in this way."""
    fit = [one for one in results if can_be(how, one.key)]
    for choose in (_part, lambda one: one.key.operator):
        kept = draw.choice(sorted({choose(one) for one in fit}))
        fit = [one for one in fit if choose(one) == kept]
    return draw.choice(fit)


def _part(result: Result) -> int:
    return next(n for n, phases in enumerate(PHASES) if result.key.phase in phases)


def can_be(how: str, key: EventKey) -> bool:
    """Whether a training goes on with such a result corrupted in this way."""
    if how != "sign":
        return True
    # AdamW stops at a negative number of steps, an embedding at a negative index.
    return "float" in key.dtype and (key.phase != "optimizer" or bool(key.shape))


class Restart:
    """Each step from step 1 on begins with the weights and states that step 1 began with."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            return
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        live = [*model.parameters(), *model.buffers(), *states]
        if step == 1:
            self._kept = [tensor.clone() for tensor in live]
        for tensor, kept in zip(live, self._kept, strict=True):
            tensor.copy_(kept)


@dataclass(frozen=True)
class Flips:
    """A run of independent steps, in each of which one result is corrupted."""

    run: Path
    expected: dict[int, Result]  # by step

    def missed(self, clean: Path) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """(what was corrupted, what the verdict names), where these are not the same."""
        named = {step: named_by(clean, self.run, "--steps", f"{step}-") for step in self.expected}
        return [
            (one.place, named[step])
            for step, one in self.expected.items()
            if one.place != named[step]
        ]


def flipped(output: Path, clean: list[Result], hows: Sequence[str], **options: Any) -> Flips:
    """Corrupt, in one of these ways, each step but the first of which the clean run has results."""
    draw = random.Random(output.name)
    expected, corrupt = {}, []
    for step in sorted({one.step for one in clean} - {0}):
        how = draw.choice(hows)
        expected[step] = drawn([one for one in clean if one.step == step], draw, how)
        corrupt.append(corruption(expected[step], how))
    mode = partial(CorruptedCalls, corrupt, draw)
    return Flips(independent(output, len(expected), mode=mode, **options), expected)


def independent(output: Path, num: int, **options: Any) -> Path:
    """A run with `num` steps, besides the first, that do not depend on each other."""
    return record(output, level="op", num_steps=num + 1, before_step=Restart(), **options)


def corruption(result: Result, how: str) -> Corruption:
    return Corruption(str(result.key.operator), result.nth, result.key.slot, how)


def named_by(baseline: Path, target: Path, *options: str) -> dict[str, Any] | None:
    """Where the first divergence is."""
    first = compare(baseline, target, *options)["first_divergence"]
    return None if first is None else {field: first[field] for field in FIELDS}
