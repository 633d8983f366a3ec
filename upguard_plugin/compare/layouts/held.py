"""The values of what ranks hold in a step, as columns: one row per holding.

In:  the batches of some ranks, and their plan.
Out: a `HeldStep`; those of several processes become one by `joined_steps`.

Where holders of one piece disagree, its row has the value of the first, and `Others` the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.layouts.holdings import Holding, Ints, Plan, RankRows, Seen
from upguard_plugin.compare.layouts.units import Place, is_sample
from upguard_plugin.trace.batch import NONE, EventBatch

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Columns of fingerprints and numbers."""

    h: Words
    s: Words
    number: Floats  # NaN for what is no scalar

    @classmethod
    def of(cls, batch: EventBatch, rows: Ints) -> Values:
        missing = np.full(len(rows), np.nan)
        number = missing if batch.value is None else batch.value[rows]
        return cls(batch.h[rows], batch.s[rows], number)

    @classmethod
    def empty(cls, length: int) -> Values:
        words = np.zeros(length, np.uint64)
        return cls(words, words.copy(), np.full(length, np.nan))

    def __getitem__(self, rows: Ints | Bools | slice) -> Values:
        return Values(self.h[rows], self.s[rows], self.number[rows])

    def put(self, rows: Ints, values: Values) -> None:
        self.h[rows], self.s[rows], self.number[rows] = values.h, values.s, values.number

    def differ(self, other: Values) -> Bools:
        """Row by row. One NaN is like another."""
        numbers = (self.number != other.number) & ~(np.isnan(self.number) & np.isnan(other.number))
        found: Bools = (self.h != other.h) | (self.s != other.s) | numbers
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """Values of holders that disagree with the first."""

    holding: Ints  # of each row
    values: Values


@dataclass(frozen=True, slots=True, eq=False)
class HeldStep:
    """What some ranks hold in a step: rows of all columns are the holdings of the plan."""

    values: Values
    seq: Ints  # program order on the first holder
    nonfinite: Ints  # NONE where not counted
    sketch: Floats | None  # [holdings, K]; a row of NaN where none was taken
    others: Others

    def __len__(self) -> int:
        return len(self.seq)

    @classmethod
    def nothing(cls) -> HeldStep:
        values, numbers = Values.empty(0), np.zeros(0, np.int64)
        return cls(values, numbers, numbers, None, Others(numbers, values))

    def take(self, rows: Ints) -> HeldStep:
        """These rows, which are in order."""
        others = np.isin(self.others.holding, rows)
        return HeldStep(
            self.values[rows],
            self.seq[rows],
            self.nonfinite[rows],
            None if self.sketch is None else self.sketch[rows],
            Others(np.searchsorted(rows, self.others.holding[others]), self.others.values[others]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class WholePlan:
    """The plans of all processes in one, in order of the ranks."""

    holdings: tuple[Holding, ...]
    left_out: Mapping[Seen, str]
    places: frozenset[Place]
    samples: tuple[tuple[int, Holding], ...]  # which of the holdings are samples

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> WholePlan:
        left_out: dict[Seen, str] = {}
        for plan in plans:
            left_out |= plan.left_out
        holdings = tuple(holding for plan in plans for holding in plan.holdings)
        return cls(
            holdings,
            left_out,
            frozenset(place for plan in plans for place in plan.places),
            tuple(
                (row, one)
                for row, one in enumerate(holdings)
                if is_sample(one.key.role, one.key.slot)
            ),
        )

    def only(self, rows: Ints) -> WholePlan:
        """The plan of these holdings."""
        return WholePlan(tuple(self.holdings[row] for row in rows.tolist()), {}, frozenset(), ())


def held_step(plan: Plan, ranks: Sequence[RankRows], batches: Mapping[int, EventBatch]) -> HeldStep:
    """The values of one step. ranks, batches: in the plan's order."""
    length = len(plan.holdings)
    values, seq = Values.empty(length), np.zeros(length, np.int64)
    nonfinite = np.full(length, NONE, np.int64)
    sketch = _no_sketches(length, batches)
    known = np.zeros(length, np.bool_)
    others = []
    for its, batch in zip(ranks, batches.values(), strict=True):
        new = ~known[its.of_lead]
        to, rows = its.of_lead[new], its.lead[new]
        values.put(to, Values.of(batch, rows))
        seq[to] = batch.seq[rows]
        if batch.nonfinite is not None:
            nonfinite[to] = batch.nonfinite[rows]
        if sketch is not None and batch.sketch is not None:
            sketch[to] = batch.sketch[rows]
        known[to] = True
        mine = Values.of(batch, its.rows)
        other = np.flatnonzero(mine.differ(values[its.holding]))
        if len(other):
            others.append(Others(its.holding[other], mine[other]))
    return HeldStep(values, seq, nonfinite, sketch, _joined_others(others))


def _no_sketches(length: int, batches: Mapping[int, EventBatch]) -> Floats | None:
    """Room for sketches, where some were taken, all of one size."""
    sizes = {batch.sketch.shape[1] for batch in batches.values() if batch.sketch is not None}
    return np.full((length, sizes.pop()), np.nan) if len(sizes) == 1 else None


def joined_steps(steps: Sequence[HeldStep]) -> HeldStep:
    """The steps of all processes as one, in their order."""
    if len(steps) == 1:
        return steps[0]
    starts = np.cumsum([0, *(len(step) for step in steps)])
    others = [
        Others(step.others.holding + start, step.others.values)
        for step, start in zip(steps, starts[:-1], strict=True)
    ]
    return HeldStep(
        _joined_values([step.values for step in steps]),
        np.concatenate([step.seq for step in steps]),
        np.concatenate([step.nonfinite for step in steps]),
        _joined_sketches(steps),
        _joined_others(others),
    )


def _joined_values(parts: Sequence[Values]) -> Values:
    return Values(
        np.concatenate([part.h for part in parts]),
        np.concatenate([part.s for part in parts]),
        np.concatenate([part.number for part in parts]),
    )


def _joined_others(parts: Sequence[Others]) -> Others:
    """Each value once for each holding."""
    parts = [part for part in parts if len(part.holding)]
    if not parts:
        return Others(np.zeros(0, np.int64), Values.empty(0))
    holding = np.concatenate([part.holding for part in parts])
    values = _joined_values([part.values for part in parts])
    order = np.lexsort((values.number, values.s, values.h, holding))
    holding, values = holding[order], values[order]
    again = (holding[1:] == holding[:-1]) & ~values[1:].differ(values[:-1])
    once = np.concatenate([[True], ~again])
    return Others(holding[once], values[once])


def _joined_sketches(steps: Sequence[HeldStep]) -> Floats | None:
    sizes = {step.sketch.shape[1] for step in steps if step.sketch is not None}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    parts = [
        np.full((len(step), size), np.nan) if step.sketch is None else step.sketch for step in steps
    ]
    return np.concatenate(parts)
