"""A stream of operator calls, edited in known ways: which event is which is known.

Edits: delete, insert a helper, repeat, rename, fuse two into one, swap neighbours. On top, a tenth
of all values differ, as behind a divergence.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from upguard_plugin.compare.keys import KeySpace
from upguard_plugin.compare.pairing import pair_step
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch

EDITS = ("delete", "insert", "repeat", "rename", "fuse", "swap")

Call = tuple[str, str, int]  # boundary, operator, value


def recorded(rng: random.Random) -> list[Call]:
    """40 blocks of 60 calls of 25 operators: most names occur several times in their block."""
    return [
        (f"blocks.{block}", f"aten.op{rng.randrange(25)}", 1000 * block + place)
        for block in range(40)
        for place in range(60)
    ]


def edited(rng: random.Random, calls: list[Call], share: float, edits=EDITS):
    """The edited calls, each with the place it has in `calls`, or None where it has none."""
    result: list[tuple[Call, int | None]] = []
    place = 0
    while place < len(calls):
        call = calls[place]
        edit = rng.choice(edits) if rng.random() < share else "keep"
        boundary, operator, value = call
        if edit == "insert":
            result.append(((boundary, "aten.helper", 10**6 + place), None))
        elif edit == "repeat":
            result.append(((boundary, operator, 10**6 + place), None))
        if edit == "rename":
            result.append(((f"{boundary}.renamed", operator, value), None))
        elif edit == "fuse":
            result.append(((boundary, "aten.fused", value), None))
            place += 1  # the next one is part of it
        elif edit == "swap" and place + 1 < len(calls) and calls[place + 1][1] != operator:
            result += [(calls[place + 1], place + 1), (call, place)]
            place += 1
        elif edit != "delete":
            result.append((call, place))
        place += 1
    return [
        ((b, o, v + 10**7) if rng.random() < 0.1 else (b, o, v), old) for (b, o, v), old in result
    ]


def step_of(calls: list[Call]) -> EventBatch:
    keys = [
        EventKey(boundary, "forward", "output", "0", "float32", (4,), operator=operator)
        for boundary, operator, _ in calls
    ]
    table = list(dict.fromkeys(keys))
    number = {key: i for i, key in enumerate(table)}
    counted: Counter[EventKey] = Counter()
    call = []
    for key in keys:
        call.append(counted[key])
        counted[key] += 1
    return EventBatch(
        step=0,
        keys=table,
        key=np.array([number[key] for key in keys], np.int32),
        seq=np.arange(len(keys)),
        microbatch=np.zeros(len(keys), np.int32),
        call=np.array(call, np.int32),
        h=np.array([value for *_, value in calls], np.uint64),
        s=np.zeros(len(keys), np.uint64),
    )


def found_and_right(seed: int, share: float, edits=EDITS) -> tuple[set, set]:
    rng = random.Random(seed)
    calls = recorded(rng)
    target = edited(rng, calls, share, edits)
    pairing = pair_step(step_of(calls), step_of([call for call, _ in target]), KeySpace())
    found = zip(pairing.baseline_rows.tolist(), pairing.target_rows.tolist(), strict=True)
    return set(found), {(old, new) for new, (_, old) in enumerate(target) if old is not None}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit != "swap"])
def test_one_kind_of_edit_is_undone(edit, seed):
    found, right = found_and_right(seed, 0.1, (edit,))

    assert not wrong(found, right)
    assert len(found & right) >= 0.985 * len(right)


@pytest.mark.parametrize("seed", range(2))
def test_swapped_neighbours_find_their_partners(seed):
    """Of two swapped calls of which one differs, nobody can tell which of its name moved."""
    found, right = found_and_right(seed, 0.05, ("swap",))

    assert len(wrong(found, right)) <= 0.002 * len(right)
    assert len(found & right) >= 0.985 * len(right)


@pytest.mark.parametrize("seed", range(4))
def test_all_kinds_of_edits_together_are_undone(seed):
    found, right = found_and_right(seed, 0.1)

    assert len(wrong(found, right)) <= 0.001 * len(right)
    assert len(found & right) >= 0.99 * len(right)


def test_without_edits_all_pairs_are_found():
    found, right = found_and_right(0, 0.0)

    assert found == right


def wrong(found: set, right: set) -> set:
    """Pairs of two events of which at least one has another partner.

    An event that was deleted where one of its name was inserted looks like one with another value:
    nobody can tell.
    """
    partners_b, partners_t = dict(right), {new: old for old, new in right}
    return {(b, t) for b, t in found - right if b in partners_b or t in partners_t}
