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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import KeySpace
from upguard_plugin.compare.pairing import Pairing, pair_step
from upguard_plugin.compare.run import Run
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.trace.step_table import NO_ITERATION, StepTable

_KEPT_STEPS = 3  # the divergent step and its neighbours, from which causes are read
_SEARCHED_STEPS = 200  # for the one where the other run resumed; each is decoded

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Weights = Mapping[str, tuple[int, int]]  # fingerprints
Judge = Callable[[int, int, Pairing], Pairing]  # step, its number in the target, its pairs


def as_it_is(step: int, target_step: int, pairing: Pairing) -> Pairing:
    """Unequal is unequal: between equal layouts nothing differs by rounding."""
    return pairing


@dataclass(frozen=True, slots=True, eq=False)
class _Matched:
    """Which step is which, as columns."""

    tables: tuple[StepTable, StepTable]
    rows: tuple[Ints, Ints]  # of the steps that both have, in the baseline's order

    @classmethod
    def of(cls, baseline: StepTable, target: StepTable, lag: int) -> _Matched:
        """lag: how many steps the target's numbers lag behind, where there are no iterations."""
        numbers_b, numbers_t = _iterations(baseline), _iterations(target)
        if numbers_b is None or numbers_t is None:
            numbers_b, numbers_t = baseline.step, target.step + lag
        rows_b, rows_t = _last_rows(numbers_b), _last_rows(numbers_t)
        _, ours, theirs = np.intersect1d(
            numbers_b[rows_b], numbers_t[rows_t], assume_unique=True, return_indices=True
        )
        order = np.argsort(rows_b[ours], kind="stable")
        return cls((baseline, target), (rows_b[ours][order], rows_t[theirs][order]))


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
        """lag: see `steps_behind`. judge: tells what differs by rounding, across layouts."""
        self._judge = judge
        self.rank = rank
        self.runs = (baseline, target)
        self.space = space or KeySpace()
        self._lag = lag
        self._matched: _Matched | None = None
        self._kept: OrderedDict[int, Pairing] = OrderedDict()

    @property
    def common(self) -> Ints:
        """Numbers of the steps that both have, in the baseline's numbering and order."""
        return self.tables[0].step[self._match.rows[0]]

    @property
    def tables(self) -> tuple[StepTable, StepTable]:
        """All steps of the baseline and of the target."""
        return self._match.tables

    @property
    def num_events(self) -> Ints:
        """Of each common step in the baseline."""
        return self.tables[0].num_events[self._match.rows[0]]

    @property
    def has_equal_digests(self) -> Bools:
        """One answer per common step."""
        rows, tables = self._match.rows, self.tables
        same: Bools = (tables[0].digest[rows[0]] == tables[1].digest[rows[1]]).all(axis=1)
        return same

    def partner(self, step: int) -> int | None:
        """The target's number of a step of the baseline, or None where one of them lacks it."""
        place = int(np.searchsorted(self.common, step))
        if place == len(self.common) or self.common[place] != step:
            return None
        return int(self.tables[1].step[self._match.rows[1][place]])

    @property
    def first_pair(self) -> tuple[int, int] | None:
        """The first step that both have, in the baseline's numbers and the target's."""
        if not len(self.common):
            return None
        rows = self._match.rows
        return int(self.common[0]), int(self.tables[1].step[rows[1][0]])

    @property
    def is_resumed(self) -> bool:
        """Whether one run starts at a later step of the other."""
        rows = self._match.rows
        return len(rows[0]) > 0 and (rows[0][0] == 0) != (rows[1][0] == 0)

    @property
    def covers_the_rest(self) -> bool:
        """Whether both runs end with the same step."""
        rows = self._match.rows
        return len(rows[0]) > 0 and all(
            at[-1] == len(table) - 1 for at, table in zip(rows, self.tables, strict=True)
        )

    def pairing(self, step: int, verify: bool = False) -> Pairing | None:
        """The step's events in pairs, or None where a run does not have the step."""
        if step not in self._kept:
            partner = self.partner(step)
            if partner is None:
                return None
            baseline = self.runs[0].read(self.rank, step, verify=verify)
            target = self.runs[1].read(self.rank, partner, verify=verify)
            pairing = pair_step(baseline, target, self.space)
            self._kept[step] = self._judge(step, partner, pairing)
            if len(self._kept) > _KEPT_STEPS:
                self._kept.popitem(last=False)
        return self._kept[step]

    @property
    def num_kept_events(self) -> int:
        """Events of both runs that are in memory."""
        kept = self._kept.values()
        return sum(len(p.baseline.batch) + len(p.target.batch) for p in kept)

    def forget(self, step: int | None) -> None:
        """Free what can be read again, but for the events of this step."""
        self._matched = None
        for other in [kept for kept in self._kept if kept != step]:
            del self._kept[other]

    def is_first_recorded(self, step: int) -> bool:
        firsts = [int(table.step[0]) for table in self.tables]
        return step == firsts[0] or self.partner(step) == firsts[1]

    @property
    def _match(self) -> _Matched:
        if self._matched is None:
            tables = [StepTable.of(run.steps(self.rank)) for run in self.runs]
            self._matched = _Matched.of(tables[0], tables[1], self._lag)
        return self._matched


def steps_behind(baseline: Run, target: Run, rank: int) -> int:
    """How many steps the target's numbers lag behind the baseline's.

    0 unless the runs start with other weights, and one of them with those of a later step of the
    other: then it is its continuation.
    """
    runs = (baseline, target)
    tables = [StepTable.of(run.steps(rank)) for run in runs]
    if not all(tables) or bool((tables[0].digest[0] == tables[1].digest[0]).all()):
        return 0
    if all(_iterations(table) is not None for table in tables):
        return 0  # then steps are matched by these
    starts: list[list[int]] = [table.step[:_SEARCHED_STEPS].tolist() for table in tables]
    first = [weights_in(run.read(rank, at[0])) for run, at in zip(runs, starts, strict=True)]
    if agree(first[0], first[1]):
        return 0
    for step in starts[0][1:]:
        if agree(weights_in(baseline.read(rank, step)), first[1]):
            return step - starts[1][0]
    for step in starts[1][1:]:
        if agree(first[0], weights_in(target.read(rank, step))):
            return starts[0][0] - step
    return 0


def _iterations(table: StepTable) -> Ints | None:
    """The framework's number of each step; None where a step has none."""
    missing = not len(table) or bool((table.iteration == NO_ITERATION).any())
    return None if missing else table.iteration


def _last_rows(numbers: Ints) -> Ints:
    """The row of each number; of an iteration that was run again, the last."""
    if bool((numbers[1:] > numbers[:-1]).all()):
        return np.arange(len(numbers), dtype=np.int64)
    _, from_the_end = np.unique(numbers[::-1], return_index=True)
    rows: Ints = np.sort(len(numbers) - 1 - from_the_end)
    return rows


def agree(weights: Weights, others: Weights) -> bool:
    """Whether most weights are equal."""
    shared = weights.keys() & others.keys()
    return 2 * sum(weights[name] == others[name] for name in shared) > len(shared)


def weights_in(batch: EventBatch, phases: tuple[str, ...] = ("start",)) -> Weights:
    """The weights as these phases show them; of several times, the last."""
    chosen = [
        number
        for number, key in enumerate(batch.keys)
        if key.phase in phases and key.role == "param"
    ]
    rows = np.flatnonzero(np.isin(batch.key, chosen)).tolist()
    return {batch.key_of(row).boundary: (int(batch.h[row]), int(batch.s[row])) for row in rows}
