"""Two runs of other layouts as two runs of one rank.

In:  two runs.
Out: two `LogicalRun`s, which compare reads like any run: rank 0 holds the events of the logical
     tensors. What one side cannot merge is left out on both, counted by its reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from upguard_plugin.compare.layouts.alike import numbers_apart
from upguard_plugin.compare.layouts.compared import Compared
from upguard_plugin.compare.layouts.gathering import GatheredStep, Gathering, StepOf
from upguard_plugin.compare.layouts.held import Bools, WholePlan
from upguard_plugin.compare.layouts.holdings import Ints
from upguard_plugin.compare.layouts.left_out import LeftOut
from upguard_plugin.compare.layouts.merge import LogicalStep, StepEvents, merge_step
from upguard_plugin.compare.layouts.names import About, MergePlan, merge_plan
from upguard_plugin.compare.layouts.sums import Sizes
from upguard_plugin.compare.layouts.taint import Taint
from upguard_plugin.compare.layouts.units import Units
from upguard_plugin.compare.run import Array, Run, RunView
from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace.batch import NONE, EventBatch, RankEnd, StepEntry
from upguard_plugin.trace.step_table import StepTable

LOGICAL_RANK = 0
_Steps = tuple[int | None, int | None]  # of the baseline and the target; None: it has no such step
_MAX_KEPT = 3  # pairs of steps: the divergent one and its neighbours
_MAX_PLANS = 4  # structures that steps may take turns in


class LogicalPair:
    """Both runs, merged step by step in the same way; on the first process of a team."""

    def __init__(self, gathering: Gathering, baseline: int, target: int) -> None:
        """baseline, target: which of the gathered runs they are."""
        self.left_out = LeftOut()
        self.taint = Taint(self.events)
        self._gathering, self._numbers = gathering, (baseline, target)
        self._partners: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})
        self._behind: Mapping[int | None, int] = {}  # the step behind each of the baseline
        sums: dict[Sizes, int] = {}
        self._sides = (_Side(0, sums), _Side(1, sums))
        self._units: Units | None = None  # of the last step
        self._chosen: OrderedDict[Hashable, Compared] = OrderedDict()
        self._events: OrderedDict[_Steps, tuple[StepEvents, StepEvents]] = OrderedDict()
        self._counted: set[_Steps] = set()

    def views(self) -> tuple[LogicalRun, LogicalRun]:
        """The baseline and the target as runs of one rank."""
        return LogicalRun(self, 0), LogicalRun(self, 1)

    def match(self, partner: Mapping[int, int]) -> None:
        """Say which step of the target is which of the baseline; before, each stands alone."""
        self._partners = (partner, {theirs: ours for ours, theirs in partner.items()})
        self._behind = dict(pairwise(partner))

    def run(self, side: int) -> Run:
        """One of the two."""
        return self._gathering.runs[self._numbers[side]]

    def table(self, side: int) -> StepTable:
        """The steps that all ranks have."""
        return self._gathering.tables[self._numbers[side]]

    def events(self, side: int, step: int) -> StepEvents:
        """The events of a step, row by row."""
        other = self._partners[side].get(step)
        steps = (other, step) if side else (step, other)
        if steps not in self._events:
            self._events[steps] = self._merged(steps)
            if len(self._events) > _MAX_KEPT:
                self._events.popitem(last=False)
        return self._events[steps][side]

    def _merged(self, steps: _Steps) -> tuple[StepEvents, StepEvents]:
        gathered = self._gathered(steps)
        units = self._units_of(gathered)
        merged = [
            merge_step(one.held, side.plan(one.plan, units))
            for side, one in zip(self._sides, gathered, strict=True)
        ]
        compared = self._compared(merged[0], merged[1], units)
        if None not in steps and steps not in self._counted:  # else it is merged once more
            self.left_out.add(compared.left_out)
            self.left_out.measure(compared.lost_pairs, *merged)
            self._counted.add(steps)
        ours, theirs = (
            self._in_order(side, step, one, rows)
            for side, (step, one, rows) in enumerate(zip(steps, merged, compared.rows, strict=True))
        )
        return ours, theirs

    def _gathered(self, steps: _Steps) -> tuple[GatheredStep, GatheredStep]:
        wanted = self._asked_for(steps)
        if len(wanted) == 2:
            ahead = self._asked_for(self._next(steps))
            return tuple(self._gathering.steps(wanted, ahead))  # type: ignore[return-value]
        (alone,) = self._gathering.steps(wanted)  # it is only asked which weights it begins with
        pair = alone.weights_at_start(), GatheredStep.nothing()
        return pair if steps[0] is not None else pair[::-1]

    def _asked_for(self, steps: _Steps) -> list[StepOf]:
        return [
            StepOf(run, step)
            for run, step in zip(self._numbers, steps, strict=True)
            if step is not None
        ]

    def _next(self, steps: _Steps) -> _Steps:
        """The pair of steps behind this one, which is looked at if these are equal."""
        behind = self._behind.get(steps[0])
        return behind, None if behind is None else self._partners[0][behind]

    def _units_of(self, gathered: Sequence[GatheredStep]) -> Units:
        ours, theirs = gathered
        units = Units.of((ours.samples(), theirs.samples()), (ours.plan.places, theirs.plan.places))
        if self._units is None or not units.is_like(self._units):
            self._units = units
        return self._units

    def _compared(self, baseline: LogicalStep, target: LogicalStep, units: Units) -> Compared:
        """Mostly it is what was compared of the step before."""
        numbers = numbers_apart(baseline.numbers(), target.numbers(), units)
        name = (*baseline.structure(), *target.structure(), numbers)
        if name not in self._chosen:
            self._chosen[name] = Compared.of(baseline, target, units, numbers)
            if len(self._chosen) > _MAX_PLANS:
                self._chosen.popitem(last=False)
        return self._chosen[name]

    def _in_order(
        self, side: int, step: int | None, merged: LogicalStep, compared: Bools
    ) -> StepEvents:
        rows = np.flatnonzero(compared)
        order = merged.plan.order[rows]
        rows = rows[np.lexsort((merged.seq[rows], *order.T[::-1]))]
        row = None if step is None else self.table(side).row_of(step)
        entry = None if row is None else self.table(side)[row]
        return self._sides[side].events(merged, rows, entry)


class _Side:
    """What is kept of one run from step to step."""

    def __init__(self, side: int, sums: dict[Sizes, int]) -> None:
        """sums: numbers that mean the same on both sides."""
        self._side, self._sums = side, sums
        self._plans: OrderedDict[Hashable, MergePlan] = OrderedDict()
        self._table: list[EventKey] = []
        self._numbers: dict[EventKey, int] = {}  # places in the table
        self._columns: dict[MergePlan, Ints] = {}

    def plan(self, whole: WholePlan, units: Units) -> MergePlan:
        """The plan for steps of one structure whose micro-batches belong together so."""
        name = (whole, units)
        if name not in self._plans:
            self._plans[name] = merge_plan(whole, units, self._side)
            if len(self._plans) > _MAX_PLANS:
                self._columns.pop(self._plans.popitem(last=False)[1], None)
        return self._plans[name]

    def events(self, merged: LogicalStep, rows: Ints, entry: StepEntry | None) -> StepEvents:
        """These rows of a step as events of one rank, in this order."""
        sketch = None if merged.sketch is None else merged.sketch[rows]
        if sketch is not None and bool(np.isnan(sketch[:, 0]).all()):
            sketch = None
        key, microbatch, call, sums = self._columns_of(merged, rows).T.astype(np.int32)
        batch = EventBatch(
            step=-1 if entry is None else entry.step,
            iteration=None if entry is None else entry.iteration,
            mark=None if entry is None else entry.mark,
            keys=self._table,
            key=key,
            seq=np.arange(len(rows), dtype=np.int64),
            microbatch=microbatch,
            call=call,
            h=merged.h[rows],
            s=merged.s[rows],
            value=merged.number[rows],
            sketch=sketch,
        )
        return StepEvents(merged, rows, batch, sums)

    def _columns_of(self, merged: LogicalStep, rows: Ints) -> Ints:
        """[rows, 4]: key, unit, call and the number of its sums.

        Only what is compared has keys in the table: it tells what a run records.
        """
        plan = merged.plan
        if plan not in self._columns:
            self._columns[plan] = np.full((len(plan.abouts), 4), NONE, np.int64)
        columns = self._columns[plan]
        for row in rows[columns[rows, 0] == NONE].tolist():
            columns[row] = self._columns_in(plan.abouts[row])
        found: Ints = columns[rows]
        for share in plan.shares:
            if not merged.has_number[share.event] and share.event in rows:
                found[rows == share.event] = self._columns_in(share.as_tensor)
        return found

    def _columns_in(self, about: About) -> tuple[int, int, int, int]:
        number = self._numbers.setdefault(about.key, len(self._table))
        if number == len(self._table):
            self._table.append(about.key)
        sums = self._sums.setdefault(about.sums, len(self._sums))
        return number, about.name[1], about.name[2], sums


class LogicalRun(RunView):
    """One of the two, as a run of one rank."""

    def __init__(self, pair: LogicalPair, side: int) -> None:
        super().__init__(pair.run(side))
        self._pair, self._side = pair, side

    @property
    def ranks(self) -> tuple[int, ...]:
        return (LOGICAL_RANK,)

    @property
    def listed_ranks(self) -> tuple[int, ...]:
        return self.ranks

    def has_trace(self, rank: int) -> bool:
        return rank == LOGICAL_RANK

    def layout(self, rank: int) -> Layout:
        return Layout()

    def steps(self, rank: int) -> StepTable:
        """The steps that all ranks have. Their digests say nothing: nothing is merged for them."""
        table = self._pair.table(self._side)
        # The other side's is another: every step is read.
        return replace(table, digest=np.full_like(table.digest, self._side))

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        """verify: of no account, the gathering has been told."""
        return self._pair.events(self._side, step).batch

    def has_tensors(self, rank: int, name: str) -> bool:
        return False  # ranks keep their parts; nobody has the whole

    def read_tensors(self, rank: int, name: str) -> dict[str, Array]:
        return {}

    def end(self, rank: int) -> RankEnd:
        ends = [self._run.end(r) for r in self._run.ranks]
        reason = next((end.reason for end in ends if not end.complete), "")
        notes = dict.fromkeys(note for end in ends for note in end.notes)
        return RankEnd(all(end.complete for end in ends), reason, tuple(notes))
