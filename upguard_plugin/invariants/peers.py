"""Ranks that must differ do, and ranks that must agree do: batches and random streams.

In:  the axes of the layout: ranks of `dp` train on different samples, ranks of `tp` on the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from upguard_plugin.invariants.events import (
    RankEvents,
    Sides,
    StepEvents,
    named_ranks,
    odd_ones,
    same_events,
    unequal,
    what,
)
from upguard_plugin.invariants.findings import Findings, Invariant, made
from upguard_plugin.records import EventKey

# Generators whose streams belong to a region of the model, by a word in their name: on ranks of
# these axes they must differ, or ranks drop the same places of different neurons.
_STREAMS = {"model-parallel": ("tp", "dense"), "expert": ("ep", "expert")}


def _is_batch(key: EventKey) -> bool:
    return key.role == "data" and key.phase == "data"


class BatchesDiffer(Invariant):
    """Data-parallel ranks do not train on the same batch."""

    name = "batches-differ"

    def look(self, step: StepEvents, found: Findings) -> None:
        for ranks in groups(step, "dp", "dense"):
            batches = {rank: _batches(step.ranks[rank]) for rank in ranks}
            microbatches = {k: None for mine in batches.values() for k in mine}
            for k in microbatches:
                self._compare(step, {r: mine[k] for r, mine in batches.items() if k in mine}, found)

    def _compare(self, step: StepEvents, rows: dict[int, list[int]], found: Findings) -> None:
        if len(rows) < 2:
            return
        by_content: dict[Hashable, Sides] = defaultdict(dict)
        for rank, mine in rows.items():
            events = step.ranks[rank]
            content = tuple((events.key(row).boundary, events.content(row)) for row in mine)
            by_content[content][rank] = mine[0]
        for sides in by_content.values():
            rank, row = next(iter(sides.items()))
            if len(sides) == 1:
                found.hold(step.ranks[rank], row)
            else:
                found.breaks(
                    step, sides, f"{named_ranks(sides)} of axis dp train on the same batch."
                )


def _batches(events: RankEvents) -> dict[int, list[int]]:
    """micro-batch -> the rows of all its tensors."""
    found: dict[int, list[int]] = {}
    for row in events.rows(_is_batch):
        found.setdefault(events.microbatch(row), []).append(row)
    return found


class BatchesAgree(Invariant):
    """Tensor-parallel ranks train on the same batch.

    A batch of floats without a placement may be cut along its sequence: it is a suspect.
    """

    name = "batches-agree"

    def look(self, step: StepEvents, found: Findings) -> None:
        same = same_events(step, _is_batch, _boundary)
        for ranks in groups(step, "tp", "dense"):
            for everywhere in same.values():
                sides = {rank: everywhere[rank] for rank in ranks if rank in everywhere}
                if len(sides) > 1:
                    self._compare(step, sides, found)

    def _compare(self, step: StepEvents, sides: Sides, found: Findings) -> None:
        rank, row = next(iter(sides.items()))
        key = step.ranks[rank].key(row)
        if key.placement is not None:
            found.skip(step.ranks[rank], row, "its placement is declared: see replicas-agree")
            return
        contents = {rank: step.ranks[rank].content(row) for rank, row in sides.items()}
        if len(set(contents.values())) == 1:
            found.hold(step.ranks[rank], row)
            return
        odd = odd_ones(contents)
        sentence = (
            f"{what(key)} must be the same on {named_ranks(sides)} of axis tp, but "
            f"{unequal(odd, sides)}."
        )
        difference = made(self.name, step, sides, sentence, ranks=odd)
        if "int" in key.dtype:
            found.add(difference)
        else:
            found.suspect(difference)


def _boundary(key: EventKey) -> Hashable:
    return key.boundary


class StreamsDiffer(Invariant):
    """Random streams of a parallel region differ between the ranks of the region."""

    name = "streams-differ"

    def look(self, step: StepEvents, found: Findings) -> None:
        for sides in same_events(step, _is_stream, _boundary).values():
            rank, row = next(iter(sides.items()))
            boundary = step.ranks[rank].key(row).boundary
            for word, (axis, mesh) in _STREAMS.items():
                if word in boundary:
                    for ranks in (*groups(step, axis, mesh), *groups(step, axis, _other(mesh))):
                        self._compare(step, {r: sides[r] for r in ranks if r in sides}, found)

    def _compare(self, step: StepEvents, sides: Sides, found: Findings) -> None:
        by_content: dict[Hashable, Sides] = defaultdict(dict)
        for rank, row in sides.items():
            by_content[step.ranks[rank].content(row)][rank] = row
        for same in by_content.values():
            rank, row = next(iter(same.items()))
            if len(sides) > 1 and len(same) == 1:
                found.hold(step.ranks[rank], row)
            elif len(same) > 1:
                key = step.ranks[rank].key(row)
                found.breaks(
                    step, same, f"{what(key)} must differ between {named_ranks(same)}; it is equal."
                )


def _is_stream(key: EventKey) -> bool:
    return key.role == "rng" and key.phase == "start"


def _other(mesh: str) -> str:
    return "dense" if mesh == "expert" else "expert"


def groups(step: StepEvents, axis: str, mesh: str) -> Iterator[list[int]]:
    """The recorded ranks of each group of an axis that has more than one."""
    seen: dict[tuple[int, ...], None] = {}
    for events in step:
        found = events.layout.axis(axis, mesh)
        if found is not None and found.size > 1:
            seen[found.ranks] = None
    for ranks in seen:
        yield [rank for rank in ranks if rank in step.ranks]
