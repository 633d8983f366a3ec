"""Which step of the baseline is which of the target, and their events in pairs.

In:  the same rank of both runs.
Out: `RankSteps`, in the baseline's numbering.

Steps are matched by the framework's iteration where both runs have it, else by number. A resumed
run of a loop without iterations starts again at step 0: it is recognised by the weights it starts
with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from upguard_plugin.compare.keys import KeySpace
from upguard_plugin.compare.pairing import Pairing, pair_step
from upguard_plugin.compare.run import Run
from upguard_plugin.trace.batch import EventBatch, StepEntry

_KEPT_STEPS = 3  # the divergent step and its neighbours, from which causes are read
_SEARCHED_STEPS = 200  # for the one where the other run resumed; each is decoded

Weights = Mapping[str, tuple[int, int]]  # fingerprints
Entries = Mapping[int, StepEntry]
Judge = Callable[[int, int, Pairing], Pairing]  # step, its number in the target, its pairs


def as_it_is(step: int, target_step: int, pairing: Pairing) -> Pairing:
    """Unequal is unequal: between equal layouts nothing differs by rounding."""
    return pairing


class RankSteps:
    """The steps that both runs have of one rank."""

    def __init__(
        self,
        baseline: Run,
        target: Run,
        rank: int,
        lag: int = 0,
        space: KeySpace | None = None,
        judge: Judge = as_it_is,
    ) -> None:
        """lag: how many steps the target's numbers lag behind, where there are no iterations.

        judge: tells what differs by rounding, across layouts.
        """
        self._judge = judge
        self.rank = rank
        self.runs = (baseline, target)
        self.space = space or KeySpace()
        self._kept: OrderedDict[int, Pairing] = OrderedDict()
        self.baseline = {entry.step: entry for entry in baseline.steps(rank)}
        self.target = {entry.step: entry for entry in target.steps(rank)}
        self.partner = self._matched(lag)  # step of the baseline -> step of the target
        self.common = sorted(self.partner)

    @property
    def is_resumed(self) -> bool:
        """Whether one run starts at a later step of the other."""
        if not self.common:
            return False
        first = self.common[0]
        return (first == min(self.baseline)) != (self.partner[first] == min(self.target))

    @property
    def covers_the_rest(self) -> bool:
        """Whether both runs end with the same step."""
        if not self.common:
            return False
        last = self.common[-1]
        return last == max(self.baseline) and self.partner[last] == max(self.target)

    def pairing(self, step: int, verify: bool = False) -> Pairing | None:
        """The step's events in pairs, or None where a run does not have the step."""
        if step not in self.partner:
            return None
        if step not in self._kept:
            baseline = self.runs[0].read(self.rank, step, verify=verify)
            target = self.runs[1].read(self.rank, self.partner[step], verify=verify)
            pairing = pair_step(baseline, target, self.space)
            self._kept[step] = self._judge(step, self.partner[step], pairing)
            if len(self._kept) > _KEPT_STEPS:
                self._kept.popitem(last=False)
        return self._kept[step]

    def forget(self, step: int | None) -> None:
        """Free the events of all steps but this one."""
        for other in [kept for kept in self._kept if kept != step]:
            del self._kept[other]

    def is_first_recorded(self, step: int) -> bool:
        return step == min(self.baseline) or self.partner[step] == min(self.target)

    def _matched(self, lag: int) -> dict[int, int]:
        ours, theirs = _by_iteration(self.baseline), _by_iteration(self.target)
        if ours is not None and theirs is not None:
            return {ours[number]: theirs[number] for number in ours.keys() & theirs.keys()}
        return {step: step - lag for step in self.baseline if step - lag in self.target}


def steps_behind(baseline: Run, target: Run, rank: int) -> int:
    """How many steps the target's numbers lag behind the baseline's.

    0 unless the runs start with other weights, and one of them with those of a later step of the
    other: then it is its continuation.
    """
    runs = (baseline, target)
    entries = tuple(run.steps(rank) for run in runs)
    if not entries[0] or not entries[1] or entries[0][0].digest == entries[1][0].digest:
        return 0
    starts = [[entry.step for entry in listed[:_SEARCHED_STEPS]] for listed in entries]
    first = [_weights_at_start(run.read(rank, at[0])) for run, at in zip(runs, starts, strict=True)]
    if _agree(first[0], first[1]):
        return 0
    for step in starts[0][1:]:
        if _agree(_weights_at_start(baseline.read(rank, step)), first[1]):
            return step - starts[1][0]
    for step in starts[1][1:]:
        if _agree(first[0], _weights_at_start(target.read(rank, step))):
            return starts[0][0] - step
    return 0


def _by_iteration(entries: Entries) -> dict[int, int] | None:
    """Step of each iteration; of one that was run again, the last. None without iterations."""
    numbers = {e.iteration: e.step for e in entries.values() if e.iteration is not None}
    complete = all(entry.iteration is not None for entry in entries.values())
    return numbers if complete and entries else None


def _agree(weights: Weights, others: Weights) -> bool:
    """Whether most weights are equal."""
    shared = weights.keys() & others.keys()
    return 2 * sum(weights[name] == others[name] for name in shared) > len(shared)


def _weights_at_start(batch: EventBatch) -> Weights:
    chosen = [
        number
        for number, key in enumerate(batch.keys)
        if key.phase == "start" and key.role == "param"
    ]
    rows = np.flatnonzero(np.isin(batch.key, chosen)).tolist()
    return {batch.key_of(row).boundary: (int(batch.h[row]), int(batch.s[row])) for row in rows}
