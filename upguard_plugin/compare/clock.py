"""Which ranks' divergences come first: a logical clock from collectives and send/recv.

In:  per rank, the step's events and the place where the rank first differs.
Out: the ranks whose divergence no other rank's can have caused.

A collective's result on one rank happens after every member's input; a receive after its send. Wall
clocks are never asked. Only the messages of one step are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import ROLE_NUMBER
from upguard_plugin.compare.sides import Side

Ints = npt.NDArray[np.int64]

COMMUNICATING_PHASES = ("grad_sync", "clip", "optimizer", "param_sync")


@dataclass(frozen=True, slots=True)
class RankMessages:
    """What one rank gives to others and gets from them in a step, in program order."""

    rank: int
    rows: tuple[int, ...]
    names: tuple[Hashable, ...]  # what all rows of one message have in common, on every rank
    gives: tuple[bool, ...]


@dataclass(slots=True)
class _Message:
    """One collective, or one send with its receive: rows by rank."""

    sent: dict[int, int] = field(default_factory=dict)  # last row that gives something in
    received: dict[int, int] = field(default_factory=dict)  # first row that has the result


def messages_of(rank: int, side: Side) -> RankMessages:
    rows = np.flatnonzero(_communicates(side)).tolist()
    roles = side.columns.role[side.batch.key[rows]]
    return RankMessages(
        rank,
        tuple(rows),
        tuple(_name(side, rank, row) for row in rows),
        tuple((roles == ROLE_NUMBER["input"]).tolist()),
    )


def minimal_ranks(events: Sequence[RankMessages], differs_at: Mapping[int, int]) -> set[int]:
    """Ranks whose divergence happened after no other rank's.

    events: of every rank that took part in the step. differs_at: row in these events where the rank
    first differs; ranks that do not differ are absent.
    """
    messages = _messages(events)
    by_rank: dict[int, list[_Message]] = defaultdict(list)
    for message in messages:
        for rank in message.sent:
            by_rank[rank].append(message)
    tainted = dict(differs_at)  # rank -> first row that may know of some divergence
    arrived: dict[int, int] = {}  # rank -> first row that knows of another rank's
    waiting = list(tainted)
    while waiting:
        rank = waiting.pop()
        for message in by_rank[rank]:
            if message.sent[rank] < tainted[rank]:
                continue
            for other, row in message.received.items():
                if other == rank:
                    continue
                arrived[other] = min(arrived.get(other, row), row)
                if row < tainted.get(other, row + 1):
                    tainted[other] = row
                    waiting.append(other)
    return {rank for rank, row in differs_at.items() if arrived.get(rank, row + 1) > row}


def _messages(events: Sequence[RankMessages]) -> list[_Message]:
    messages: dict[Hashable, _Message] = defaultdict(_Message)
    for listed in events:
        for row, name, gives in zip(listed.rows, listed.names, listed.gives, strict=True):
            message = messages[name]
            if gives:
                message.sent[listed.rank] = row
            else:
                message.received.setdefault(listed.rank, row)
    return list(messages.values())


def _communicates(side: Side) -> npt.NDArray[np.bool_]:
    batch = side.batch
    talks = np.zeros(len(batch), dtype=np.bool_)
    if batch.group_seq is not None:
        talks |= batch.group_seq >= 0
    if batch.pair_seq is not None:
        talks |= batch.pair_seq >= 0
    return talks


def _name(side: Side, rank: int, row: int) -> Hashable:
    batch, key = side.batch, side.batch.key_of(row)
    if batch.pair_seq is not None and batch.pair_seq[row] >= 0 and batch.peer is not None:
        peer = int(batch.peer[row])
        ends = (rank, peer) if key.role == "input" else (peer, rank)
        return ("pair", *ends, int(batch.pair_seq[row]))
    assert batch.group_seq is not None
    ranks = () if key.group is None else key.group.ranks
    return ("group", ranks, int(batch.group_seq[row]))
