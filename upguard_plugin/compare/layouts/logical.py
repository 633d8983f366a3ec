"""Two runs of other layouts as two runs of one rank.

In:  two runs.
Out: two `LogicalRun`s, which compare reads like any run: rank 0 holds the events of the logical
     tensors. What one side cannot merge is left out on both, counted by its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from upguard_plugin.compare.layouts.alike import not_alike
from upguard_plugin.compare.layouts.merge import (
    LogicalEvent,
    Name,
    dp_index,
    merge_step,
)
from upguard_plugin.compare.layouts.parts import Floats
from upguard_plugin.compare.layouts.taint import Taint
from upguard_plugin.compare.layouts.units import Units
from upguard_plugin.compare.run import Array, Manifest, Run
from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace.batch import EventBatch, RankEnd, StepEntry

LOGICAL_RANK = 0
_Steps = tuple[int | None, int | None]  # of the baseline and the target; None: it has no such step
_MAX_NAMED = 5  # boundaries without a placement that a note names


@dataclass(slots=True)
class LeftOut:
    """What was not compared, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    boundaries: dict[str, dict[str, None]] = field(default_factory=dict)  # by reason, in order

    def add(self, names: Mapping[Name, str]) -> None:
        for name, reason in names.items():
            self.counts[reason] += 1
            self.boundaries.setdefault(reason, {}).setdefault(f"{name[0][1]} ({name[0][2]})")

    def notes(self) -> list[str]:
        """One sentence per reason, with the first boundaries it concerns."""
        notes = []
        for reason, count in self.counts.most_common():
            names = list(self.boundaries[reason])
            more = "" if len(names) <= _MAX_NAMED else f" and {len(names) - _MAX_NAMED} more"
            notes.append(
                f"not compared: {count} events, {reason}: {', '.join(names[:_MAX_NAMED])}{more}"
            )
        return notes


class LogicalPair:
    """Both runs, merged step by step in the same way."""

    def __init__(self, baseline: Run, target: Run) -> None:
        self.left_out = LeftOut()
        self.taint = Taint(self.events)
        self._runs = (baseline, target)
        self._layouts = tuple({r: run.layout(r) for r in run.ranks} for run in self._runs)
        self._keys: tuple[dict[EventKey, int], ...] = ({}, {})
        self._tables: tuple[list[EventKey], ...] = ([], [])
        self._partners: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})
        self._kept: dict[_Steps, tuple[EventBatch, EventBatch]] = {}
        self._events: dict[_Steps, tuple[list[LogicalEvent], list[LogicalEvent]]] = {}
        self._counted: set[_Steps] = set()

    def views(self) -> tuple[LogicalRun, LogicalRun]:
        """The baseline and the target as runs of one rank."""
        return LogicalRun(self, 0, self._runs[0]), LogicalRun(self, 1, self._runs[1])

    def match(self, partner: Mapping[int, int]) -> None:
        """Say which step of the target is which of the baseline; before, each stands alone."""
        self._partners = (partner, {theirs: ours for ours, theirs in partner.items()})

    def read(self, side: int, step: int, verify: bool = False) -> EventBatch:
        return self._kept[self._merged(side, step, verify)][side]

    def events(self, side: int, step: int) -> list[LogicalEvent]:
        """The events of a step, row by row."""
        return self._events[self._merged(side, step)][side]

    def _merged(self, side: int, step: int, verify: bool = False) -> _Steps:
        """See to it that a step and its partner are at hand."""
        other = self._partners[side].get(step)
        steps = (other, step) if side else (step, other)
        if steps not in self._kept:
            if len(self._kept) > 2:
                oldest = next(iter(self._kept))
                del self._kept[oldest], self._events[oldest]
            self._kept[steps] = self._merge(steps, verify)
        return steps

    def _merge(self, steps: _Steps, verify: bool) -> tuple[EventBatch, EventBatch]:
        batches: list[dict[int, EventBatch]] = [
            {} if step is None else {r: run.read(r, step, verify=verify) for r in run.ranks}
            for run, step in zip(self._runs, steps, strict=True)
        ]
        if None in steps:  # it is only asked which weights it begins with
            batches = [{r: _weights_at_start(b) for r, b in side.items()} for side in batches]
        indexes = [{r: dp_index(layout) for r, layout in side.items()} for side in self._layouts]
        units = Units(batches[0], batches[1], (indexes[0], indexes[1]))
        merged = [
            merge_step(batches[side], self._layouts[side], places, units.joined, units.in_line)
            for side, places in enumerate((units.baseline, units.target))
        ]
        lost = dict(merged[0].left_out) | dict(merged[1].left_out)
        lost |= not_alike(merged[0].events, merged[1].events, lost, units)
        if None not in steps and steps not in self._counted:  # else it is merged once more
            self.left_out.add(lost)
            self._counted.add(steps)
        kept = tuple(
            sorted(
                (event for name, event in side.events.items() if name not in lost),
                key=lambda event: event.order,
            )
            for side in merged
        )
        self._events[steps] = (kept[0], kept[1])
        return self._batch(0, steps[0], kept[0]), self._batch(1, steps[1], kept[1])

    def _batch(self, side: int, step: int | None, events: Sequence[LogicalEvent]) -> EventBatch:
        run = self._runs[side]
        entry = next((e for e in run.steps(run.ranks[0]) if e.step == step), None)
        return EventBatch(
            step=-1 if step is None else step,
            iteration=None if entry is None else entry.iteration,
            mark=None if entry is None else entry.mark,
            keys=self._tables[side],
            key=np.array([self._number(side, event) for event in events], np.int32),
            seq=np.arange(len(events), dtype=np.int64),
            microbatch=np.array([event.microbatch for event in events], np.int32),
            call=np.array([event.call for event in events], np.int32),
            h=np.array([event.whole.value[0] for event in events], np.uint64),
            s=np.array([event.whole.value[1] for event in events], np.uint64),
            value=np.array(
                [np.nan if event.number is None else event.number for event in events], np.float64
            ),
            sketch=_sketches(events),
        )

    def _number(self, side: int, event: LogicalEvent) -> int:
        number = self._keys[side].setdefault(event.key, len(self._tables[side]))
        if number == len(self._tables[side]):
            self._tables[side].append(event.key)
        return number


class LogicalRun:
    """One of the two, as `compare.run.Run`."""

    def __init__(self, pair: LogicalPair, side: int, run: Run) -> None:
        self._pair, self._side, self._run = pair, side, run
        self.ranks = self.listed_ranks = (LOGICAL_RANK,)
        self.missing_ranks = run.missing_ranks

    @property
    def path(self) -> Path:
        return self._run.path

    @property
    def manifest(self) -> Manifest:
        return self._run.manifest

    @property
    def attempts(self) -> tuple[Path, ...]:
        return self._run.attempts

    def has_trace(self, rank: int) -> bool:
        return rank == LOGICAL_RANK

    def layout(self, rank: int) -> Layout:
        return Layout()

    def steps(self, rank: int) -> tuple[StepEntry, ...]:
        """The steps that all ranks have. Their digests say nothing: nothing is merged for them."""
        listed = [self._run.steps(r) for r in self._run.ranks]
        common = set.intersection(*({entry.step for entry in steps} for steps in listed))
        unknown = bytes([self._side]) * 16  # the other side's is another: the step is read
        return tuple(
            StepEntry(e.step, e.iteration, e.mark, e.num_events, unknown)
            for e in listed[0]
            if e.step in common
        )

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        return self._pair.read(self._side, step, verify)

    def has_tensors(self, rank: int, name: str) -> bool:
        return False  # ranks keep their parts; nobody has the whole

    def read_tensors(self, rank: int, name: str) -> dict[str, Array]:
        return {}

    def end(self, rank: int) -> RankEnd:
        ends = [self._run.end(r) for r in self._run.ranks]
        reason = next((end.reason for end in ends if not end.complete), "")
        notes = dict.fromkeys(note for end in ends for note in end.notes)
        return RankEnd(all(end.complete for end in ends), reason, tuple(notes))


def _weights_at_start(batch: EventBatch) -> EventBatch:
    wanted = [
        number
        for number, key in enumerate(batch.keys)
        if key.phase == "start" and key.role == "param"
    ]
    rows = np.flatnonzero(np.isin(batch.key, wanted))
    columns = {name: getattr(batch, name)[rows] for name in ("key", "seq", "microbatch", "call")}
    return EventBatch(step=batch.step, keys=batch.keys, h=batch.h[rows], s=batch.s[rows], **columns)


def _sketches(events: Sequence[LogicalEvent]) -> Floats | None:
    """One row per event, NaN where none was taken; None without any."""
    sizes = {len(event.whole.sketch) for event in events if event.whole.sketch is not None}
    if len(sizes) != 1:
        return None
    missing = np.full(sizes.pop(), np.nan)
    return np.array(
        [missing if event.whole.sketch is None else event.whole.sketch for event in events]
    )
