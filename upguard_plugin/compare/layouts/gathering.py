"""The steps of runs of other layouts: each process reads its own ranks, the first has the whole.

In:  runs, and a team. The first process says which step it wants, and the others serve it.
Out: on the first process `GatheredStep`s, the holdings of all ranks.

Bytes are read once, by the process that looked at the rank first. What travels is one row per piece
that a process holds, and a plan once per structure of a step. While the first process judges a
step, the others read the one that it will want next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from upguard_plugin.compare.layouts.held import HeldStep, WholePlan, held_step, joined_steps
from upguard_plugin.compare.layouts.holdings import Plan, RankRows, plan_of, structure_of
from upguard_plugin.compare.layouts.units import Held, SampleSeen, samples_of
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.survey import own_ranks
from upguard_plugin.compare.team import Part, Team, joined
from upguard_plugin.errors import UpGuardError
from upguard_plugin.records import EventKey
from upguard_plugin.trace.step_table import StepTable

_MAX_PLANS = 4  # structures that the steps of a run may take turns in, as with evaluations
_KEPT_PER_RUN = 2  # steps: the last one, and the first, which is asked for its weights before

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class StepOf:
    """A step of a run."""

    run: int  # its place among the runs
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class GatheredStep:
    """What all ranks hold in a step."""

    plan: WholePlan  # the same object for steps of one structure
    held: HeldStep

    @classmethod
    def nothing(cls) -> GatheredStep:
        return cls(WholePlan.of([]), HeldStep.nothing())

    def samples(self) -> Held:
        """The samples of each place."""
        values = self.held.values
        return samples_of(
            SampleSeen(holding.key, holding.seen.place, (int(values.h[row]), int(values.s[row])))
            for row, holding in self.plan.samples
        )

    def weights_at_start(self) -> GatheredStep:
        """The same without all else."""
        rows = np.array(
            [
                row
                for row, holding in enumerate(self.plan.holdings)
                if (holding.key.phase, holding.key.role) == ("start", "param")
            ],
            np.int64,
        )
        return GatheredStep(self.plan.only(rows), self.held.take(rows))


@dataclass(frozen=True, slots=True)
class _Order:
    """What the first process asks of all."""

    wanted: tuple[StepOf, ...]  # nothing: that was all
    ahead: tuple[StepOf, ...]  # what it will probably ask for next


@dataclass(frozen=True, slots=True, eq=False)
class _Brought:
    """What one process holds of a step."""

    number: int  # of its plan
    plan: Plan | None  # where it is new
    forgotten: tuple[int, ...]  # plans that are not meant any more
    held: HeldStep


class Gathering:
    """One process of the team, with the ranks that it reads."""

    def __init__(self, runs: Sequence[Run], team: Team, *, verify: bool = False) -> None:
        """verify: check the digest of each step that is read.

        Raises TraceError for damaged files, on all processes.
        """
        self._team, self.runs = team, runs
        self._own = [_OwnRanks(run, own_ranks(run, team), verify) for run in runs]
        self.tables = [_common_steps(own, team) for own in self._own]
        self._plans = [_Plans(team.size) for _ in runs]
        self._kept: OrderedDict[StepOf, GatheredStep] = OrderedDict()
        self._failed = False  # and all processes know

    def led(self, lead: Callable[[], Answer]) -> Answer:
        """What the first process finds, on all processes; the others serve it until it is done."""
        team = self._team
        if team.index:
            self._serve()
            served: list[Answer] = team.share(list)
            return served[0]
        if team.size == 1:
            return lead()
        found = Part.of(lambda: [lead()])
        if not self._failed:  # else all processes raise it
            team.share(lambda: [_Order((), ())])
            found = Part(team.share(lambda: joined([found])))
        answers: list[Answer] = joined([found])
        return answers[0]

    def steps(self, wanted: Sequence[StepOf], ahead: Sequence[StepOf] = ()) -> list[GatheredStep]:
        """These steps, on the first process. ahead: what will probably be asked for next."""
        missing = tuple(one for one in wanted if one not in self._kept)
        if missing:
            gathered = self._gather(_Order(missing, tuple(ahead)))
            self._kept.update(zip(missing, gathered, strict=True))
        found = [self._kept[one] for one in wanted]
        while len(self._kept) > _KEPT_PER_RUN * len(self._own):
            self._kept.popitem(last=False)
        return found

    def _gather(self, order: _Order) -> list[GatheredStep]:
        team, num_wanted = self._team, len(order.wanted)
        self._failed = True
        if team.size > 1:
            team.share(lambda: [order])
        brought = team.collect(lambda: self._bring(order.wanted))
        self._failed = False
        found = []
        for place, one in enumerate(order.wanted):
            parts = brought[place::num_wanted]
            plan = self._plans[one.run].joined(parts)
            found.append(GatheredStep(plan, joined_steps([part.held for part in parts])))
        return found

    def _serve(self) -> None:
        order = self._next_order()
        while order.wanted:
            self._team.collect(partial(self._bring, order.wanted))
            for one in order.ahead:
                self._own[one.run].prepare(one.step)
            order = self._next_order()

    def _next_order(self) -> _Order:
        orders: list[_Order] = self._team.share(list)
        return orders[0]

    def _bring(self, wanted: Sequence[StepOf]) -> list[_Brought]:
        return [self._own[one.run].bring(one.step) for one in wanted]


class _OwnRanks:
    """The ranks of a run that this process reads."""

    def __init__(self, run: Run, ranks: Sequence[int], verify: bool) -> None:
        self._run, self.ranks, self._verify = run, ranks, verify
        self._layouts = {rank: run.layout(rank) for rank in ranks}
        self._plans: OrderedDict[Hashable, _OwnPlan] = OrderedDict()
        self._num_plans = 0
        self._forgotten: list[int] = []
        self._prepared: tuple[int, _OwnPlan, HeldStep] | None = None

    def tables(self) -> list[StepTable]:
        return [StepTable.of(self._run.steps(rank)) for rank in self.ranks]

    def bring(self, step: int) -> _Brought:
        """What these ranks hold of the step. Raises TraceError for damaged files."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] != step:
            prepared = (step, *self._read(step))
        _, plan, held = prepared
        is_new, plan.is_known = not plan.is_known, True
        forgotten, self._forgotten = tuple(self._forgotten), []
        return _Brought(plan.number, plan.plan if is_new else None, forgotten, held)

    def prepare(self, step: int) -> None:
        """Read a step that may be asked for; what is wrong with it is said when it is."""
        try:
            self._prepared = (step, *self._read(step))
        except UpGuardError:
            self._prepared = None

    def _read(self, step: int) -> tuple[_OwnPlan, HeldStep]:
        batches = {rank: self._run.read(rank, step, verify=self._verify) for rank in self.ranks}
        structure = structure_of(batches)
        plan = self._plans.get(structure)
        if plan is None:
            made, rows = plan_of(batches, self._layouts)
            tables = [batch.keys for batch in batches.values()]
            plan = self._plans[structure] = _OwnPlan(self._num_plans, made, rows, tables)
            self._num_plans += 1
        self._plans.move_to_end(structure)
        if len(self._plans) > _MAX_PLANS:
            self._forgotten.append(self._plans.popitem(last=False)[1].number)
        return plan, held_step(plan.plan, plan.rows, batches)


@dataclass(slots=True, eq=False)
class _OwnPlan:
    number: int
    plan: Plan
    rows: Sequence[RankRows]
    tables: Sequence[Sequence[EventKey]]  # kept, so that no other table gets the same id
    is_known: bool = False  # to the first process


class _Plans:
    """The plans of all processes for one run, on the first."""

    def __init__(self, num_processes: int) -> None:
        self._known: list[dict[int, Plan]] = [{} for _ in range(num_processes)]
        self._joined: OrderedDict[tuple[int, ...], WholePlan] = OrderedDict()

    def joined(self, parts: Sequence[_Brought]) -> WholePlan:
        """The plan of a step of which each process has brought its part."""
        for known, part in zip(self._known, parts, strict=True):
            if part.plan is not None:
                known[part.number] = part.plan
        numbers = tuple(part.number for part in parts)
        if numbers not in self._joined:
            plans = [known[number] for known, number in zip(self._known, numbers, strict=True)]
            self._joined[numbers] = WholePlan.of(plans)
        self._joined.move_to_end(numbers)
        if len(self._joined) > _MAX_PLANS:
            self._joined.popitem(last=False)
        for known, part in zip(self._known, parts, strict=True):
            for number in part.forgotten:
                known.pop(number, None)
        return self._joined[numbers]


def _common_steps(own: _OwnRanks, team: Team) -> StepTable:
    """The steps that all ranks have, as the first rank's index tells them."""

    def own_table() -> list[StepTable]:
        tables = own.tables()
        return [_common(tables)] if tables else []

    return _common(team.share(own_table) or [StepTable.of([])])


def _common(tables: Sequence[StepTable]) -> StepTable:
    first, *others = tables
    common = np.ones(len(first), np.bool_)
    for table in others:
        common &= np.isin(first.step, table.step)
    return replace(
        first,
        step=first.step[common],
        iteration=first.iteration[common],
        num_events=first.num_events[common],
        digest=first.digest[common],
        mark=first.mark[common],
    )
