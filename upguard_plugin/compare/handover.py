"""A run that goes on where the other one ended: the state it found against the state that was left.

In:  two runs without a step in common, one of which begins where the other ends.
Out: views of both with one step. The earlier one's holds what its last step left behind, as if it
     stood at a start; the later one's what its first step found of that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.run import Run, RunView
from upguard_plugin.compare.steps import agree, weights_in
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.trace.step_table import NO_ITERATION, StepTable

Ints = npt.NDArray[np.int64]
Name = tuple[str, str, str]  # boundary, role, slot

_STATE = ("param", "buffer", "master", "optimizer_state", "rng")
_BEHIND = ("optimizer", "param_sync", "checkpoint")  # phases whose last word is what a step leaves


def handover_of(baseline: Run, target: Run, rank: int) -> int:
    """1 if the target begins where the baseline ended, -1 the other way round, else 0.

    rank: one that both have; all ranks of a run are alike in this.
    """
    return int(_follows(baseline, target, rank)) - int(_follows(target, baseline, rank))


def handed_over(baseline: Run, target: Run, order: int) -> tuple[Run, Run]:
    """The views of the two. order: as `handover_of` says, not 0."""
    left = LeftState(baseline if order > 0 else target)
    found = FoundState(target if order > 0 else baseline, left)
    return (left, found) if order > 0 else (found, left)


def _follows(earlier: Run, later: Run, rank: int) -> bool:
    """By iteration where both have it; else by the weights."""
    ended, began = (StepTable.of(run.steps(rank)) for run in (earlier, later))
    if not len(ended) or not len(began) or bool((ended.digest[0] == began.digest[0]).all()):
        return False
    numbers = int(ended.iteration[-1]), int(began.iteration[0])
    if NO_ITERATION not in numbers:
        return numbers[0] + 1 == numbers[1]
    found = weights_in(later.read(rank, int(began.step[0])), ("start",))
    if not found or agree(weights_in(earlier.read(rank, int(ended.step[0])), ("start",)), found):
        return False
    return agree(weights_in(earlier.read(rank, int(ended.step[-1])), _BEHIND), found)


class LeftState(RunView):
    """What the last step of a run left, as the start of the one behind it."""

    def steps(self, rank: int) -> StepTable:
        return _one_step(StepTable.of(self._run.steps(rank))[-1:], digest=0)

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        batch = self._run.read(rank, step, verify=verify)
        rows: dict[Name, int] = {}
        for row in _rows_in(batch, _BEHIND).tolist():
            rows[_name(batch.key_of(row))] = row  # the last word counts
        moved = [row for name, row in rows.items() if name[1] != "rng" or _moved(batch, name, row)]
        return _as_start(batch, np.array(sorted(moved), np.int64))


class FoundState(RunView):
    """What the first step of a run found of the state that another one left."""

    def __init__(self, run: Run, left: LeftState) -> None:
        super().__init__(run)
        self._left = left

    def steps(self, rank: int) -> StepTable:
        return _one_step(StepTable.of(self._run.steps(rank))[:1], digest=1)

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        left = self._left.read(rank, int(self._left.steps(rank).step[0]))
        names = {_name(left.key_of(row)) for row in range(len(left))}
        batch = self._run.read(rank, step, verify=verify)
        rows = [r for r in _rows_in(batch, ("start",)).tolist() if _name(batch.key_of(r)) in names]
        return _as_start(batch, np.array(rows, np.int64))


def _one_step(table: StepTable, digest: int) -> StepTable:
    """Both sides' steps match, and their digests say nothing."""
    same = np.zeros_like(table.iteration)
    return replace(table, iteration=same, digest=np.full_like(table.digest, digest))


def _rows_in(batch: EventBatch, phases: tuple[str, ...]) -> Ints:
    wanted = [
        number
        for number, key in enumerate(batch.keys)
        if key.role in _STATE and (key.phase in phases or _is_left_buffer(key, phases))
    ]
    return np.flatnonzero(np.isin(batch.key, wanted))


def _is_left_buffer(key: EventKey, phases: tuple[str, ...]) -> bool:
    """Buffers are recorded as the last forward left them."""
    return phases is _BEHIND and (key.phase, key.role) == ("forward", "buffer")


def _moved(batch: EventBatch, name: Name, row: int) -> bool:
    """Whether the step drew from a generator: of one that nobody uses, nothing has to be kept."""
    began = [r for r in _rows_in(batch, ("start",)).tolist() if _name(batch.key_of(r)) == name]
    return bool(began) and int(batch.h[began[0]]) != int(batch.h[row])


def _name(key: EventKey) -> Name:
    return key.boundary, key.role, key.slot


def _as_start(batch: EventBatch, rows: Ints) -> EventBatch:
    """These rows of a batch, as state found at start."""
    keys = [
        replace(key, phase="start", moment=None, operator=None) if key.role in _STATE else key
        for key in batch.keys
    ]
    found = batch.take(rows)
    return replace(found, keys=keys, iteration=None, call=np.zeros_like(found.call))
