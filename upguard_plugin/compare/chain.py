"""From the first value that differs back to the operators that only one run has.

In:  the pairs of a step recorded at level `op`, and the first pair in it that differs.
Out: a `Chain`, or None where nothing is proven.

An operator without a partner is no divergence by itself: it may compute what the other run computes
too. It is the answer if what it takes is equal in both runs, what it makes is in one run only, and
the first value that differs is made of that. So the walk starts at this value, goes from readers to
writers, and ends at values that both runs have. Where one of them may have been overwritten unseen,
or was not recorded, there is no proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.producers import Producers

How = Literal["extra", "missing", "replaced", "reordered", "rewired"]

_MOST_CALLS = 256  # of one chain; runs that have more of their own are different programs


@dataclass(frozen=True, slots=True)
class Chain:
    """What stands between values that are equal and the first one that differs.

    rewired: no operator does; the value is taken from another one, which both runs have.
    """

    how: How | None  # None: one operator, whose two calls nothing else could pair
    baseline: tuple[int, ...]  # the first result of each operator, in program order
    target: tuple[int, ...]
    named: tuple[int | None, int | None]  # the first of them that takes a value which both have
    inputs_equal: bool | None  # None: they also take values that only one run has
    reached: tuple[int, int]  # the first pair of events that differs


@dataclass(slots=True)
class _Behind:
    """What stands behind a value in one run."""

    source: int | None = None  # the result that the value is, or is a view of
    is_shared: bool = False  # the other run has the value too
    calls: set[int] = field(default_factory=set)  # the first result of each
    anchored: set[int] = field(default_factory=set)  # those that take a value which both runs have
    is_proven: bool = True
    takes_own: bool = False  # also values from outside that only this run has

    def without_tail(self, length: int) -> _Behind:
        """The same but for the last calls in program order."""
        kept = set(sorted(self.calls)[: len(self.calls) - length])
        return replace(self, calls=kept, anchored=self.anchored & kept)

    @property
    def named(self) -> int | None:
        """The first call that takes a value which both runs have, else the first."""
        return min(self.anchored or self.calls, default=None)


def chain_of(pairing: Pairing, row_b: int, row_t: int) -> Chain | None:
    """The chain behind a pair of events, the first that differs in its step."""
    runs = _both(pairing, row_b, row_t)
    if not all(run.is_input.any() for run in runs):
        return None  # inputs were not recorded, so nothing could be proven
    starts, inside = ([row_b], [row_t]), False
    if all(run.is_result[row] for run, row in zip(runs, (row_b, row_t), strict=True)):
        inputs = runs[0].inputs_of(row_b), runs[1].inputs_of(row_t)
        inside = not _same_slots(runs, *inputs)
        unequal = [] if inside else _unequal(runs, *inputs)
        if not inside and not unequal:
            return None  # this operator is the origin
        starts = inputs if inside else ([unequal[0][0]], [unequal[0][1]])
    behind = [
        _walk(run, start, row if inside else None)
        for run, start, row in zip(runs, starts, (row_b, row_t), strict=True)
    ]
    if not all(found.is_proven for found in behind):
        return None
    return _classified(runs, behind[0], behind[1], (row_b, row_t))


def operands_agree(pairing: Pairing, row_b: int, row_t: int) -> bool:
    """Whether two calls of operators, each given by one of its events, take equal inputs."""
    runs = _both(pairing, row_b, row_t)
    inputs = runs[0].inputs_of(row_b), runs[1].inputs_of(row_t)
    return _same_slots(runs, *inputs) and not _unequal(runs, *inputs)


def _both(pairing: Pairing, row_b: int, row_t: int) -> tuple[Producers, Producers]:
    forms: dict[Hashable, int] = {}
    runs = Producers(pairing, 0, forms), Producers(pairing, 1, forms)
    runs[0].meet(runs[1], row_b)
    runs[1].meet(runs[0], row_t)
    return runs


def _same_slots(
    runs: tuple[Producers, Producers], rows_b: Sequence[int], rows_t: Sequence[int]
) -> bool:
    listed = [
        [run.side.batch.key_of(row) for row in rows]
        for run, rows in zip(runs, (rows_b, rows_t), strict=True)
    ]
    slots = [[(key.slot, key.moment) for key in keys] for keys in listed]
    return slots[0] == slots[1]


def _unequal(
    runs: tuple[Producers, Producers], rows_b: Sequence[int], rows_t: Sequence[int]
) -> list[tuple[int, int]]:
    pairs = zip(rows_b, rows_t, strict=True)
    return [pair for pair in pairs if not runs[0].is_equal_to(*pair)]


def _walk(run: Producers, starts: Sequence[int], reader: int | None) -> _Behind:
    """Go from readers to writers until both runs have the value.

    reader: a result of the call that takes `starts`, if it belongs to the chain itself.
    """
    found = _Behind()
    pending: list[tuple[int, int | None]] = [(row, None) for row in starts]
    if reader is not None:
        pending = _inside(run, run.first_result_of(reader), found)
    while pending and found.is_proven:
        row, call = pending.pop()
        origin, made = run.origin_of(row)
        if call is None:
            found.source, found.is_shared = made, run.is_shared(row)
        if origin == "unknown" or (origin == "own" and call is None):
            found.is_proven = False  # overwritten unseen, or nobody knows who made it
        elif origin == "own":
            found.takes_own = True
        elif origin == "both" and call is not None:
            found.anchored.add(call)
        elif origin == "made" and made is not None:
            writer = run.first_result_of(made)
            if writer not in found.calls:
                pending += _inside(run, writer, found)
    # Of what takes values of its own only, nobody knows what it would be with equal ones.
    found.is_proven &= not found.calls or bool(found.anchored) or not found.takes_own
    return found


def _inside(run: Producers, call: int, found: _Behind) -> list[tuple[int, int | None]]:
    """Take a call into the chain; what it takes, to be looked at."""
    found.calls.add(call)
    found.is_proven &= len(found.calls) <= _MOST_CALLS
    return [(row, call) for row in run.inputs_of(call)]


def _classified(
    runs: tuple[Producers, Producers], ours: _Behind, theirs: _Behind, reached: tuple[int, int]
) -> Chain | None:
    ours, theirs = _without_common_tail(runs, ours, theirs)
    named = ours.named, theirs.named
    if named == (None, None):
        if ours.source is None or theirs.source is None:
            return None
        if runs[0].partner[ours.source] == theirs.source:
            is_other_part = ours.is_shared and theirs.is_shared
            if not is_other_part:
                return None  # it was overwritten in between
        return Chain("rewired", (ours.source,), (theirs.source,), named, None, reached)
    own = ours.takes_own or theirs.takes_own
    calls = tuple(sorted(ours.calls)), tuple(sorted(theirs.calls))
    return Chain(_how(runs, calls, named), *calls, named, None if own else True, reached)


def _without_common_tail(
    runs: tuple[Producers, Producers], ours: _Behind, theirs: _Behind
) -> tuple[_Behind, _Behind]:
    """Leave out what both run in the end: what it takes differs, and it only passes that on."""
    names = [
        [run.name(row) for row in sorted(found.calls, reverse=True)]
        for run, found in zip(runs, (ours, theirs), strict=True)
    ]
    pairs = zip(*names, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if common == len(names[0]) == len(names[1]):
        common -= 1  # the first ones, at which they part
    return (
        (ours.without_tail(common), theirs.without_tail(common)) if common > 0 else (ours, theirs)
    )


def _how(
    runs: tuple[Producers, Producers],
    calls: tuple[tuple[int, ...], tuple[int, ...]],
    named: tuple[int | None, int | None],
) -> How | None:
    if named[0] is None or named[1] is None:
        side = int(named[0] is None)
        row = named[side]
        assert row is not None
        return "reordered" if runs[side].has_moved(row) else "extra" if side else "missing"
    names = [[run.name(row) for row in rows] for run, rows in zip(runs, calls, strict=True)]
    if names[0] != names[1]:
        return "reordered" if Counter(names[0]) == Counter(names[1]) else "replaced"
    inputs = runs[0].inputs_of(named[0]), runs[1].inputs_of(named[1])
    same = _same_slots(runs, *inputs) and not _unequal(runs, *inputs)
    return None if same else "replaced"
