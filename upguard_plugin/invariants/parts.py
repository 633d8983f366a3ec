"""Parts of a tensor differ: what is declared as cut and is the same on all ranks may be no part.

In:  state of declared placement, with the largest magnitude and the sketch of each rank's part.
Out: suspects only. Parts are hashed at their places, so equal parts have unlike fingerprints; their
     largest magnitudes are equal, and go on being equal.

What newcomers get wrong: one equal magnitude proves little. It may be a constant (weights of ones,
biases of zeros), and numbers of 16 bits are often equal by chance. So magnitudes are counted by
their significant bits, each number once, until they are too many for chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp, prod, sqrt

import numpy as np

from upguard_plugin.invariants.events import (
    RankEvents,
    Sides,
    StepEvents,
    named_ranks,
    same_events,
    what,
)
from upguard_plugin.invariants.findings import Break, Findings, Invariant, made
from upguard_plugin.invariants.peers import groups
from upguard_plugin.invariants.replicas import is_state
from upguard_plugin.records import EventKey

_ENOUGH_BITS = 20  # of equal magnitudes: by chance it is one in a million
_NUM_STEPS = 4  # that are looked at: parts that are none show in the first
# Norm over the largest magnitude and the root of the size: 1 for a constant, 0.58 for uniform
# numbers, less for others. The norm is estimated from the sketch to some ten percent.
_FLAT = 0.8

Axis = tuple[str, str]  # name, mesh


@dataclass(slots=True)
class _Likeness:
    """What speaks for it that all ranks of an axis hold the same of one parameter."""

    first: Break
    magnitudes: set[float] = field(default_factory=set)
    last: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, slot) -> magnitude

    @property
    def num_bits(self) -> int:
        return sum(map(_significant_bits, self.magnitudes))


class PartsDiffer(Invariant):
    """The parts of one tensor on the ranks of an axis that it is cut over are not the same."""

    name = "parts-differ"
    remembers = True

    def __init__(self) -> None:
        self._alike: dict[tuple[str, Axis], _Likeness] = {}
        self._unlike: set[tuple[str, Axis]] = set()
        self._num_steps = 0

    def look(self, step: StepEvents, found: Findings) -> None:
        if self._num_steps == _NUM_STEPS:
            return
        self._num_steps += 1
        for sides in same_events(step, _is_part, _name).values():
            rank, row = next(iter(sides.items()))
            key = step.ranks[rank].key(row)
            assert key.placement is not None  # `_is_part` says so
            if any(step.ranks[r].batch.max_abs is None for r in sides):
                found.skip(step.ranks[rank], row, "no sketch was recorded (sketch: true)")
                continue
            for axis in key.placement.sharded:
                for ranks in groups(step, axis, key.placement.mesh):
                    mine = {r: sides[r] for r in ranks if r in sides}
                    if len(mine) > 1:
                        self._compare(step, mine, (axis, key.placement.mesh), found)

    def finish(self, found: Findings) -> None:
        for name, likeness in self._alike.items():
            if name not in self._unlike and likeness.num_bits >= _ENOUGH_BITS:
                found.suspect(likeness.first)

    def _compare(self, step: StepEvents, sides: Sides, axis: Axis, found: Findings) -> None:
        rank, row = next(iter(sides.items()))
        key = step.ranks[rank].key(row)
        name = (key.boundary, axis)
        if name in self._unlike:
            return
        seen = {_look(step.ranks[r], at) for r, at in sides.items()}
        if len(seen) > 1:
            self._unlike.add(name)
            found.hold(step.ranks[rank], row)
            return
        likeness = self._alike.get(name)
        if likeness is None:
            sentence = (
                f"{what(key)} is declared as cut over {axis[0]}, but {named_ranks(sides)} hold the "
                "same: it may be whole on each."
            )
            likeness = self._alike[name] = _Likeness(made(self.name, step, sides, sentence))
        magnitude = _magnitude(step.ranks[rank], row)
        before = likeness.last.get((key.role, key.slot), magnitude)
        likeness.last[key.role, key.slot] = magnitude
        if before != magnitude or not _is_flat(step.ranks[rank], row):
            likeness.magnitudes.add(magnitude)


def _is_part(key: EventKey) -> bool:
    return is_state(key) and key.placement is not None and bool(key.placement.sharded)


def _name(key: EventKey) -> tuple[object, ...]:
    return key.boundary, key.phase, key.role, key.slot, key.moment


def _look(events: RankEvents, row: int) -> tuple[object, ...]:
    """What two equal tensors have in common, wherever they lie."""
    nonfinite = events.batch.nonfinite
    count = None if nonfinite is None else int(nonfinite[row])
    return events.key(row).shape, events.key(row).dtype, count, _magnitude(events, row)


def _magnitude(events: RankEvents, row: int) -> float:
    """The largest of the finite elements; 0 where there are no numbers."""
    assert events.batch.max_abs is not None
    largest = float(events.batch.max_abs[row])
    return largest if largest == largest else 0.0


def _is_flat(events: RankEvents, row: int) -> bool:
    """Whether all elements may have one magnitude."""
    sketch, largest = events.batch.sketch, _magnitude(events, row)
    if sketch is None or not largest:
        return True
    norm = float(np.linalg.norm(sketch[row]))
    return not norm < _FLAT * largest * sqrt(prod(events.key(row).shape))


def _significant_bits(number: float) -> int:
    mantissa = int(frexp(number)[0] * 2**53)
    return (mantissa // (mantissa & -mantissa)).bit_length() if mantissa else 0
