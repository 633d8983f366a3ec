"""The collectives and messages of a step, put together from what each rank saw of them.

In:  the events of all ranks in one step.
Out: one `Exchange` per collective of a group, one per message from a rank to another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from upguard_plugin.invariants.events import RankEvents, StepEvents
from upguard_plugin.records import EventKey, Group

Slots = dict[str, int]  # slot -> row


@dataclass(slots=True)
class Part:
    """What one rank saw of a collective."""

    events: RankEvents
    inputs: Slots = field(default_factory=dict)  # at launch
    kept: Slots = field(default_factory=dict)  # inputs at completion, where they must not change
    outputs: Slots = field(default_factory=dict)

    @property
    def row(self) -> int:
        """The first row of this rank's part."""
        return min((*self.inputs.values(), *self.kept.values(), *self.outputs.values()))

    @property
    def key(self) -> EventKey:
        return self.events.key(self.row)

    @property
    def op(self) -> str:
        return self.key.op or ""

    def sums(self, slots: Slots) -> tuple[int, int]:
        """h and s of tensors that are parts of one logical tensor."""
        prints = [self.events.batch.fingerprint(row) for row in slots.values()]
        return sum(p.h for p in prints), sum(p.s for p in prints)


@dataclass(slots=True)
class Exchange:
    """One collective, or one message with its two ends."""

    group: Group
    members: tuple[int, ...]  # of the group; of a message its two ends, the sender first
    stream: Hashable  # in which it is numbered: its group; of a message its ends and tag
    number: int
    parts: dict[int, Part] = field(default_factory=dict)

    @property
    def rows(self) -> dict[int, int]:
        """The first row of each rank's part."""
        return {rank: part.row for rank, part in self.parts.items()}

    @property
    def step(self) -> StepEvents:
        """The steps that its ranks call it in, which may be several, under the first's number."""
        first = self.first.events.batch.step
        return StepEvents(first, {rank: part.events for rank, part in self.parts.items()})

    @property
    def first(self) -> Part:
        """The part of the lowest rank that was recorded."""
        return self.parts[min(self.parts)]

    @property
    def name(self) -> str:
        """The operation without its reduce op: "all_gather"."""
        return self.first.op.partition(" ")[0]

    @property
    def reduce_op(self) -> str:
        """ "sum", "avg", ... or what else stands behind the name: "from 0"."""
        return self.first.op.partition(" ")[2]

    @property
    def is_complete(self) -> bool:
        """Whether every member was recorded."""
        return bool(self.members) and set(self.members) <= set(self.parts)


def _of_collective(key: EventKey) -> bool:
    return key.group is not None and key.op is not None


def collectives(step: StepEvents) -> list[Exchange]:
    """The collectives of the step, in the order of the lowest rank that has each."""
    found: dict[tuple[tuple[int, ...], int], Exchange] = {}
    for events in step:
        if events.batch.group_seq is None:
            continue
        for row in events.rows(_of_collective):
            key, number = events.key(row), events.group_seq(row)
            if number < 0 or key.group is None:
                continue
            ranks = key.group.ranks
            exchange = found.setdefault((ranks, number), Exchange(key.group, ranks, ranks, number))
            _add(exchange, events, row)
    return list(found.values())


def messages(step: StepEvents) -> list[Exchange]:
    """The messages of the step: a `send` with its `recv`, as far as both were recorded."""
    found: dict[tuple[Hashable, int], Exchange] = {}
    for events in step:
        batch = events.batch
        if batch.pair_seq is None or batch.peer is None:
            continue
        for row in events.rows(_of_collective):
            key, number, peer = events.key(row), int(batch.pair_seq[row]), int(batch.peer[row])
            if number < 0 or key.group is None:
                continue
            tag = -1 if batch.tag is None else int(batch.tag[row])
            ends = (events.rank, peer) if key.op == "send" else (peer, events.rank)
            stream = (key.group.ranks, *ends, tag)
            exchange = found.setdefault((stream, number), Exchange(key.group, ends, stream, number))
            _add(exchange, events, row)
    return list(found.values())


def parts_of(step: StepEvents) -> Iterator[Part]:
    """What each rank saw of each collective and message."""
    for exchange in (*collectives(step), *messages(step)):
        yield from exchange.parts.values()


def _add(exchange: Exchange, events: RankEvents, row: int) -> None:
    part = exchange.parts.setdefault(events.rank, Part(events))
    key = events.key(row)
    if key.role == "output":
        part.outputs[key.slot] = row
    elif key.moment == "completion":
        part.kept[key.slot] = row
    else:
        part.inputs[key.slot] = row
