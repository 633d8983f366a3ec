"""A step of events, edited in known ways: which event is which is known.

Edits: delete, insert a helper, repeat, rename, fuse two into one, swap neighbours. On top, a tenth
of all values differ, as behind a divergence. What is inserted or repeated is an operator call: an
additional call of a module would give its later calls other names.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from upguard_plugin.compare.keys import KeySpace, is_operator
from upguard_plugin.compare.pairing import pair_step
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch

EDITS = ("delete", "insert", "repeat", "rename", "fuse", "swap")


@dataclass(frozen=True)
class Seen:
    """One event of the stream."""

    key: EventKey
    microbatch: int
    call: int
    value: int


def stream_of(batch: EventBatch) -> list[Seen]:
    return [
        Seen(batch.key_of(row), int(batch.microbatch[row]), int(batch.call[row]), int(batch.h[row]))
        for row in range(len(batch))
    ]


def step_of(stream: list[Seen]) -> EventBatch:
    """The events of a step. Operators are numbered as they come."""
    table = list(dict.fromkeys(seen.key for seen in stream))
    number = {key: i for i, key in enumerate(table)}
    counted: Counter[tuple[EventKey, int]] = Counter()
    call = []
    for seen in stream:
        call.append(counted[seen.key, seen.microbatch] if is_operator(seen.key) else seen.call)
        counted[seen.key, seen.microbatch] += 1
    return EventBatch(
        step=0,
        keys=table,
        key=np.array([number[seen.key] for seen in stream], np.int32),
        seq=np.arange(len(stream)),
        microbatch=np.array([seen.microbatch for seen in stream], np.int32),
        call=np.array(call, np.int32),
        h=np.array([seen.value for seen in stream], np.uint64),
        s=np.zeros(len(stream), np.uint64),
    )


def edited(
    rng: random.Random, stream: list[Seen], share: float, edits: tuple[str, ...] = EDITS
) -> list[tuple[Seen, int | None]]:
    """The edited events, each with the place it has in `stream`, or None where it has none."""
    result: list[tuple[Seen, int | None]] = []
    place = 0
    while place < len(stream):
        seen = stream[place]
        edit = rng.choice(edits) if rng.random() < share else "keep"
        following = stream[place + 1] if place + 1 < len(stream) else None
        if edit == "insert":
            key = replace(seen.key, operator="aten.helper", role="output", group=None, op=None)
            result.append((replace(seen, key=key, value=10**6 + place), None))
        elif edit == "repeat" and is_operator(seen.key):
            result.append((replace(seen, value=10**6 + place), None))
        if edit == "rename":
            key = replace(seen.key, boundary=f"{seen.key.boundary}.renamed")
            result.append((replace(seen, key=key), None))
        elif edit == "fuse":
            key = replace(seen.key, operator="aten.fused")
            result.append((replace(seen, key=key), None))
            place += 1  # the next one is part of it
        elif edit == "swap" and following is not None and following.key != seen.key:
            result += [(following, place + 1), (seen, place)]
            place += 1
        elif edit != "delete":
            result.append((seen, place))
        place += 1
    return [
        (replace(seen, value=seen.value + 10**7) if rng.random() < 0.1 else seen, old)
        for seen, old in result
    ]


@dataclass(frozen=True)
class Answer:
    """How well compare paired an edited stream.

    Events that look alike, by key and value, may stand for each other.
    """

    num_right: int  # pairs that there are
    num_found: int  # of these
    wrong: list[tuple[int, int]]


def paired(stream: list[Seen], target: list[tuple[Seen, int | None]]) -> Answer:
    """Compare, and look at the pairs.

    A pair is wrong if at least one of the two has another partner. An event that was deleted where
    one of its name was inserted looks like one with another value: nobody can tell.
    """
    listed = [seen for seen, _ in target]
    pairing = pair_step(step_of(stream), step_of(listed), KeySpace())
    found = list(zip(pairing.baseline_rows.tolist(), pairing.target_rows.tolist(), strict=True))
    looks_b, looks_t = looks(stream), looks(listed)
    partners = {old: new for new, (_, old) in enumerate(target) if old is not None}
    right = Counter((looks_b[b], looks_t[t]) for b, t in partners.items())
    alone_b = {looks_b[b] for b in range(len(stream)) if b not in partners}
    alone_t = {looks_t[t] for t, (_, old) in enumerate(target) if old is None}
    seen = Counter((looks_b[b], looks_t[t]) for b, t in found)
    wrong = [
        (b, t)
        for b, t in found
        if (looks_b[b], looks_t[t]) not in right
        and not (looks_b[b] in alone_b and looks_t[t] in alone_t)
    ]
    return Answer(right.total(), (seen & right).total(), wrong)


def looks(stream: list[Seen]) -> list[tuple[EventKey, int, int]]:
    return [(seen.key, seen.microbatch, seen.value) for seen in stream]
