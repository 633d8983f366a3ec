"""Which events lie directly behind a sum over ranks: there a layout may round in its own way.

In:  the events of one rank in a step, in program order.
Out: for each of them the sizes of the groups whose sums went into it since its inputs were seen.

Two runs whose sums there have equal sizes add up the same numbers in the same order, so that only
other sizes allow a difference. (Two numbers give one sum in either order.) The norm is a sum over
what each rank has of the gradients: it depends on how ZeRO cuts them, too.
"""

from __future__ import annotations

from itertools import takewhile

from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace.batch import EventBatch

Sizes = tuple[int, ...]

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ADDING = ("sum", "avg", "premul_sum")
_MADE_FROM = {"output": "input", "grad_input": "grad_output"}  # role -> what its call began with
_TOGETHER = ("grad_sync", "clip", "optimizer", "param_sync")  # phases in which all sums are one


# ZeRO's stage -> how it cuts gradients, as a size that no group has.
_CUTS = {1: (-1,), 2: (-1,), 3: (-3,)}


class RankSums:
    """The sums of one rank, told event by event."""

    def __init__(self, batch: EventBatch, layout: Layout) -> None:
        self._cut: Sizes = _CUTS.get(layout.zero_stage or 0, ())
        self._batch = batch
        self._done: dict[str, list[tuple[int, int]]] = {}  # by phase: row and group size, in order
        self._sizes: dict[str, Sizes] = {}  # of all sums of a phase so far
        self._begun: dict[tuple[str, str, str, int, int], int] = {}  # call -> its first row
        self._before = -1  # the last row of another boundary than that of the last event
        self._last: tuple[str, int] = ("", -1)  # the last event's boundary and row

    def finish(self, row: int, key: EventKey) -> None:
        """A collective's event."""
        words = (key.op or "").split()
        adds = len(words) > 1 and words[0] in _REDUCING and words[1] in _ADDING
        if adds and key.role == "output" and key.group is not None and len(key.group.ranks) > 1:
            self._done.setdefault(key.phase, []).append((row, len(key.group.ranks)))
            self._sizes.pop(key.phase, None)

    def behind(self, row: int, key: EventKey) -> Sizes:
        """The sums that went into an event, which is none of a collective."""
        boundary, last_row = self._last
        if boundary != key.boundary:
            self._before = last_row
        self._last = (key.boundary, row)
        batch = self._batch
        place = (key.boundary, int(batch.microbatch[row]), int(batch.call[row]))
        self._begun.setdefault((key.phase, key.role, *place), row)
        if key.phase in _TOGETHER:
            return (*(self._cut if key.phase == "clip" else ()), *self._sizes_in(key.phase))
        if key.phase not in self._done or key.phase == "accumulate":
            return ()  # a gradient before it is shared
        source = _MADE_FROM.get(key.role)
        began = self._before
        if source is not None:
            began = self._begun.get((key.phase, source, *place), began)
        since = takewhile(lambda done: done[0] >= began, reversed(self._done[key.phase]))
        return tuple(sorted(size for _, size in since))

    def _sizes_in(self, phase: str) -> Sizes:
        if phase not in self._sizes:
            self._sizes[phase] = tuple(sorted(size for _, size in self._done.get(phase, ())))
        return self._sizes[phase]
