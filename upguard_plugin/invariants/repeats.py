"""What is computed twice comes out the same; what is handed on arrives as it left.

Recompute: an event in phase `recompute` is matched with its forward by boundary, call and
micro-batch. Operators carry numbers of their own; they are counted inside their module's call. A
recompute may stop as soon as backward has what it needs: what it did not reach is not missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np

from upguard_plugin.invariants.events import RankEvents, StepEvents, what
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.records import EventKey

_ROLES = frozenset({"input", "output", "rng"})
_FORWARD = frozenset({"forward", "loss"})
_NEEDS_OPERATORS = "what happens between modules is recorded at level op only"


def _in_forward(key: EventKey) -> bool:
    return key.phase in _FORWARD and key.role in _ROLES and key.group is None


def _in_recompute(key: EventKey) -> bool:
    return key.phase == "recompute" and key.role in _ROLES and key.group is None


def _is_operator(key: EventKey) -> bool:
    return key.operator is not None and "." in key.operator


class RecomputeRepeats(Invariant):
    """Inputs, random states and outputs of a recompute are those of its forward."""

    name = "recompute-repeats"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            again = list(_numbered(events, events.rows(_in_recompute)))
            if not again:
                continue
            forward = {name: row for row, name in _numbered(events, events.rows(_in_forward))}
            for row, name in again:
                first = forward.get(name)
                if first is None:
                    found.skip(events, row, "its forward was not recorded")
                elif _same(events, first, row):
                    found.hold(events, row)
                else:
                    found.breaks(
                        step,
                        {events.rank: row},
                        f"{what(events.key(row))} is not what it was in the forward that is "
                        "recomputed.",
                        producer=first,
                    )


def _numbered(events: RankEvents, rows: list[int]) -> Iterator[tuple[int, Hashable]]:
    """(row, what names its event in its forward and in its recompute alike)."""
    inside: dict[str, tuple[int, int]] = {}  # boundary -> micro-batch and call it is in
    times: dict[str, Counter[Hashable]] = {}
    for row in rows:
        key = events.key(row)
        place = (key.boundary, key.role, key.slot, key.moment)
        if not _is_operator(key):
            here = (events.microbatch(row), events.call(row))
            if inside.get(key.boundary) != here:
                inside[key.boundary], times[key.boundary] = here, Counter()
            yield row, (*place, *here)
        elif key.boundary in inside:
            name = (*place, key.operator)
            nth = times[key.boundary][name]
            times[key.boundary][name] += 1
            yield row, (*name, nth, *inside[key.boundary])


def _same(events: RankEvents, one: int, other: int) -> bool:
    return (
        events.content(one) == events.content(other)
        and events.key(one).shape == events.key(other).shape
    )


class ConsumedAsProduced(Invariant):
    """A tensor that enters a module is what it was when it left another.

    Known only where every write is recorded, at level op, and where no operator or collective wrote
    in place in between: then something out of sight did.
    """

    name = "consumed-as-produced"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            producers = events.batch.producer
            if producers is None:
                continue
            writes: list[int] | None = None
            for row in events.rows(_is_module_input):
                producer = _row_of(events, int(producers[row]))
                # The output of an operator may be another view of the same memory.
                if producer is None or not _is_module_output(events.key(producer)):
                    continue
                if events.level != "op":
                    found.skip(events, row, _NEEDS_OPERATORS)
                elif _same(events, producer, row):
                    found.hold(events, row)
                else:
                    if writes is None:
                        writes = events.rows(_writes_in_place)
                    self._judge(step, events, (producer, row), writes, found)

    def _judge(
        self,
        step: StepEvents,
        events: RankEvents,
        ends: tuple[int, int],
        writes: list[int],
        found: Findings,
    ) -> None:
        producer, row = ends
        if events.key(producer).placement != events.key(row).placement:
            found.skip(events, row, "its fingerprints were taken at different places")
            return
        if any(producer < write < row for write in writes):
            found.skip(events, row, "an operator wrote in place in between")
            return
        found.breaks(
            step,
            {events.rank: row},
            f"{what(events.key(row))} is not what {events.key(producer).boundary} left in it, and "
            "no recorded operator wrote it in between.",
            producer=producer,
        )


def _row_of(events: RankEvents, seq: int) -> int | None:
    """The row of an event of this step by its seq; rows that were left out leave gaps."""
    row = int(np.searchsorted(events.batch.seq, seq))
    return row if row < len(events.batch) and int(events.batch.seq[row]) == seq else None


def _is_module_input(key: EventKey) -> bool:
    return key.role == "input" and key.group is None and not _is_operator(key)


def _is_module_output(key: EventKey) -> bool:
    return key.role == "output" and key.group is None and not _is_operator(key)


def _writes_in_place(key: EventKey) -> bool:
    return key.role == "output" and (key.moment == "after" or key.group is not None)
