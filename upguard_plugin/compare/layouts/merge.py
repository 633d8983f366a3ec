"""One step of all ranks as the events of the logical tensors.

In:  what all ranks hold in a step, and the plan by which it is merged.
Out: a `LogicalStep`: whole tensors, as a run on one rank would have recorded them; and what cannot
     be merged, with the reason. Columns throughout: Python is run where holders disagree, no more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from upguard_plugin.compare.layouts.held import Bools, Floats, HeldStep, Values, Words
from upguard_plugin.compare.layouts.holdings import Ints
from upguard_plugin.compare.layouts.names import About, Groups, MergePlan, Name
from upguard_plugin.compare.layouts.samples import NOT_SUMMED
from upguard_plugin.compare.layouts.shares import fingerprint_of
from upguard_plugin.compare.layouts.sums import Sizes
from upguard_plugin.fingerprint.adding import add_groups, multiply
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey
from upguard_plugin.trace.batch import NONE


@dataclass(frozen=True, slots=True)
class Whole:
    """What is known of a logical tensor beside its fingerprint."""

    sketch: Floats | None
    is_agreed: bool  # replicas are equal
    num_nonfinite: int = NONE


@dataclass(frozen=True, slots=True)
class LogicalEvent:
    """An event of a logical tensor."""

    about: About
    whole: Whole
    number: float | None  # of a scalar

    @property
    def key(self) -> EventKey:
        return self.about.key

    @property
    def microbatch(self) -> int:
        return self.about.name[1]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.about.ranks

    @property
    def sums(self) -> Sizes:
        return self.about.sums


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar of a logical event."""

    about: About
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class LogicalStep:
    """What a step holds: one row per name of the plan in all columns. They are filled once."""

    plan: MergePlan
    abouts: list[About]  # the plan's, but for sums that have no number
    h: Words
    s: Words
    number: Floats  # NaN for what has none
    has_number: Bools  # a sum of shares may be NaN, and is a number
    nonfinite: Ints
    sketch: Floats | None  # [names, K]; a row of NaN where none was taken
    is_agreed: Bools  # replicas are equal
    seq: Ints  # program order on the first rank
    left_out: dict[int, str]  # why rows cannot be merged

    def events(self) -> dict[Name, About]:
        """What was merged, by name."""
        rows = enumerate(self.abouts)
        return {about.name: about for row, about in rows if row not in self.left_out}

    def numbers(self) -> dict[Name, Number]:
        """The numbers of what was merged, by name."""
        return {
            self.abouts[row].name: Number(self.abouts[row], float(self.number[row]))
            for row in np.flatnonzero(self.has_number).tolist()
            if row not in self.left_out
        }

    def lost(self) -> Iterator[tuple[Name, str]]:
        """Why events are none of a logical tensor, by name."""
        yield from self.plan.left_out.items()
        for row in sorted(self.left_out):
            yield self.abouts[row].name, self.left_out[row]

    def structure(self) -> tuple[Hashable, ...]:
        """What `events` and `lost` depend on: steps that are equal in it have the same."""
        numberless = tuple(s.event for s in self.plan.shares if not self.has_number[s.event])
        return self.plan, tuple(sorted(self.left_out.items())), numberless

    def event(self, row: int) -> LogicalEvent:
        """The event of a row."""
        about, number = self.abouts[row], float(self.number[row])
        sketch = None if self.sketch is None or np.isnan(self.sketch[row, 0]) else self.sketch[row]
        whole = Whole(sketch, bool(self.is_agreed[row]), int(self.nonfinite[row]))
        return LogicalEvent(about, whole, number if self.has_number[row] else None)


def merge_step(step: HeldStep, plan: MergePlan) -> LogicalStep:
    """Add up what is held, by the plan."""
    starts, lead = plan.starts, plan.pieces.lead
    number = step.values.number[plan.first]
    h, s, is_agreed = _pieces(step, plan.pieces)
    sketch = None if step.sketch is None else np.add.reduceat(step.sketch[lead], starts, axis=0)
    merged = LogicalStep(
        plan,
        list(plan.abouts),
        add_groups(multiply(h, plan.factor), starts),
        np.add.reduceat(s * plan.factor, starts),
        number,
        ~np.isnan(number),
        np.add.reduceat(step.nonfinite[lead], starts),
        sketch,
        np.logical_and.reduceat(is_agreed, starts),
        step.seq[plan.first],
        {},
    )
    merged.left_out.update(_why_no_wholes(merged, plan))
    _add_shares(merged, step, plan)
    merged.left_out.update(dict.fromkeys(_not_summed(step, plan), NOT_SUMMED))
    merged.left_out.update(plan.early)
    return merged


def _pieces(step: HeldStep, pieces: Groups) -> tuple[Words, Words, Bools]:
    """The fingerprint of each piece, and whether those who hold it agree."""
    lead = pieces.lead
    h, s = step.values.h[lead], step.values.s[lead]
    is_agreed = _agree(step, pieces)
    for piece in np.flatnonzero(~is_agreed).tolist():
        h[piece], s[piece] = _of_none(_values_of(step, pieces.of(piece)))
    return h, s, is_agreed


def _agree(step: HeldStep, groups: Groups) -> Bools:
    """Whether all holdings of each group have one fingerprint."""
    members, lead = groups.members, groups.lead[groups.number]
    h, s = step.values.h, step.values.s
    equal = (h[members] == h[lead]) & (s[members] == s[lead]) & ~_disputed(step)[members]
    found: Bools = np.logical_and.reduceat(equal, groups.starts)
    return found


def _disputed(step: HeldStep) -> Bools:
    """Which holdings have several fingerprints."""
    disputed = np.zeros(len(step), np.bool_)
    holding, others = step.others.holding, step.others.values
    differs = (others.h != step.values.h[holding]) | (others.s != step.values.s[holding])
    disputed[holding[differs]] = True
    return disputed


def _values_of(step: HeldStep, members: Sequence[int]) -> set[tuple[int, int]]:
    """All fingerprints of these holdings."""
    return {(int(values.h[row]), int(values.s[row])) for values, row in _rows_of(step, members)}


def _numbers_of(step: HeldStep, members: Sequence[int]) -> set[float]:
    """All numbers of these holdings."""
    return {float(values.number[row]) for values, row in _rows_of(step, members)}


def _rows_of(step: HeldStep, members: Sequence[int]) -> Iterator[tuple[Values, int]]:
    for member in members:
        yield step.values, member
    if len(step.others.holding):
        for row in np.flatnonzero(np.isin(step.others.holding, members)).tolist():
            yield step.others.values, row


def _of_none(values: set[tuple[int, int]]) -> tuple[int, int]:
    """The fingerprint of a piece whose replicas disagree: one that no tensor is likely to have."""
    h, s = sum(3 * h + 1 for h, _ in values), sum(3 * s + 1 for _, s in values)
    return h % FINGERPRINT_PRIME, s % (1 << 64)


def _why_no_wholes(merged: LogicalStep, plan: MergePlan) -> Iterator[tuple[int, str]]:
    for event, assembly in plan.assemblies.items():
        is_sketched = merged.sketch is not None and not np.isnan(merged.sketch[event, 0])
        if assembly.unsketched is not None and not is_sketched:
            yield event, assembly.unsketched
        elif assembly.reason is not None:
            yield event, assembly.reason
        elif assembly.unequal is not None and not merged.is_agreed[event]:
            yield event, assembly.unequal


def _add_shares(merged: LogicalStep, step: HeldStep, plan: MergePlan) -> None:
    """Numbers that are sums of shares are complete, whatever their tensors are."""
    for share in plan.shares:
        event = share.event
        if not merged.has_number[event]:
            merged.abouts[event] = share.as_tensor
            continue
        number = fsum(one for replicas in share.shares for one in _numbers_of(step, replicas))
        merged.number[event] = number
        merged.h[event], merged.s[event] = fingerprint_of(number)
        merged.nonfinite[event], merged.is_agreed[event] = NONE, True
        if merged.sketch is not None:
            merged.sketch[event] = np.nan
        merged.left_out.pop(event, None)


def _not_summed(step: HeldStep, plan: MergePlan) -> Iterator[int]:
    """Gradients of which ranks have other ones, and are to have one.

    They are summed later, and are compared then. Sketches of partial sums add up to that of the
    sum.
    """
    for group in np.flatnonzero(~_agree(step, plan.accumulated)).tolist():
        event = plan.accumulating[group]
        first = plan.first[event]
        is_sketched = step.sketch is not None and not np.isnan(step.sketch[first, 0])
        if not (is_sketched and event in plan.partial):
            yield event
