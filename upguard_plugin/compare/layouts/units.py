"""Which micro-batches of one run hold the samples of which of the other, whatever rank had them.

In:  the `sample` events of all ranks in a step, in both runs.
Out: units: the smallest sets of micro-batches that hold the same samples in both runs. Each place
     (data-parallel index, micro-batch) belongs to one unit, each of its samples to a position in
     it; both have the same number in both runs.

Where runs cut their batches alike, a unit is one micro-batch on each side. Equal samples
(duplicates) are matched in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from upguard_plugin.compare.run import Run
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey
from upguard_plugin.trace.batch import NONE, EventBatch

Place = tuple[int, int]  # data-parallel index, micro-batch as the rank numbers it
Sample = tuple[tuple[str, int, int], ...]  # (boundary, h, s) of each of its tensors
MAX_DIGITS = 18  # of a sample's number; a trace may say anything
Held = Mapping[Place, Sequence[Sample]]

_Node = tuple[int, Place]  # side, place


@dataclass(frozen=True, slots=True)
class SampleSeen:
    """A sample, or a part of it, as a rank has it."""

    key: EventKey
    place: Place
    value: tuple[int, int]  # h and s


@dataclass(frozen=True, slots=True)
class SideUnits:
    """The places of one run."""

    number: dict[Place, int] = field(default_factory=dict)  # of the unit
    positions: dict[Place, list[int]] = field(default_factory=dict)  # of samples in their unit

    def position(self, place: Place, sample: int) -> int:
        """Where the sample that a place numbers so stands in its unit."""
        listed = self.positions.get(place, ())
        return listed[sample] if sample < len(listed) else sample


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The micro-batches of one step, put together for both runs."""

    baseline: SideUnits
    target: SideUnits
    # Units that hold the same batch, in the order of the ranks that hold its parts; and those of
    # which at least one run needs several places, or has another order.
    in_line: frozenset[int]
    joined: frozenset[int]
    # Whether gradients that add up over micro-batches are sums of the same ones at any time.
    same_order: bool
    same_samples: bool

    @classmethod
    def of(
        cls, held: tuple[Held, Held], places: tuple[Collection[Place], Collection[Place]]
    ) -> Units:
        """held: the samples of both runs. places: all places of both, with samples or without."""
        counts = [Counter(sample for _, _, sample in _in_order(side)) for side in held]
        sides = SideUnits(), SideUnits()
        units = _connected(held)
        for number, listed in enumerate(units):
            _number_samples(number, listed, held, sides)
        in_line = [
            all(_is_in_line(one, side) for one, side in zip(listed, sides, strict=True))
            for listed in units
        ]
        same_order = _order(sides[0]) == _order(sides[1])
        for side, all_places in zip(sides, places, strict=True):
            _number_others(all_places, side, len(units))
        return cls(
            *sides,
            frozenset(number for number, yes in enumerate(in_line) if yes),
            frozenset(
                number
                for number, listed in enumerate(units)
                if not in_line[number] or any(len(one) > 1 for one in listed)
            ),
            same_order,
            counts[0] == counts[1],
        )

    def is_like(self, other: Units) -> bool:
        """Whether they put the same micro-batches and samples together."""
        return (
            self.sides == other.sides
            and (self.in_line, self.joined) == (other.in_line, other.joined)
            and self.same_order == other.same_order
        )

    @property
    def sides(self) -> tuple[SideUnits, SideUnits]:
        return self.baseline, self.target


def cut_otherwise(baseline: Run, target: Run) -> bool:
    """Whether the runs cut the same samples into other micro-batches, as their first rank shows."""
    rank = min(set(baseline.ranks) & set(target.ranks), default=None)
    if rank is None:
        return False
    steps = [{entry.step: entry for entry in run.steps(rank)} for run in (baseline, target)]
    first = min(set(steps[0]) & set(steps[1]), default=None)
    if first is None or steps[0][first].digest == steps[1][first].digest:
        return False
    held = [samples_of(samples_in(run.read(rank, first))) for run in (baseline, target)]
    sizes = [{place: len(samples) for place, samples in side.items()} for side in held]
    counts = [Counter(sample for _, _, sample in _in_order(side)) for side in held]
    return sizes[0] != sizes[1] and counts[0] == counts[1]


def _order(side: SideUnits) -> list[list[int]]:
    """The units of each micro-batch, in order."""
    units: defaultdict[int, set[int]] = defaultdict(set)
    for (_, microbatch), number in side.number.items():
        units[microbatch].add(number)
    return [sorted(units[microbatch]) for microbatch in sorted(units)]


def _is_in_line(places: Sequence[Place], side: SideUnits) -> bool:
    """Whether one micro-batch of all ranks holds the samples of a unit in their order."""
    positions = [at for place in sorted(places) for at in side.positions[place]]
    one_microbatch = len({microbatch for _, microbatch in places}) < 2
    return one_microbatch and positions == list(range(len(positions)))


def is_sample(role: str, slot: str) -> bool:
    """Whether such events are samples: their slots are numbers, unless a trace says nonsense."""
    return role == "sample" and slot.isdecimal() and len(slot) <= MAX_DIGITS


def samples_of(seen: Iterable[SampleSeen]) -> Held:
    """The samples of each place. Their parts on several ranks are added up.

    seen: in order of the ranks, of which the first counts where several have a part.
    """
    parts: dict[Place, dict[int, dict[str, dict[object, tuple[int, int]]]]] = {}
    for one in seen:
        found = parts.setdefault(one.place, {}).setdefault(int(one.key.slot), {})
        pieces = None if one.key.placement is None else one.key.placement.pieces
        found.setdefault(one.key.boundary, {}).setdefault(pieces, one.value)
    return {
        place: [
            tuple((name, *_added(values.values())) for name, values in sorted(samples[i].items()))
            for i in sorted(samples)
        ]
        for place, samples in parts.items()
    }


def samples_in(batch: EventBatch) -> Iterator[SampleSeen]:
    """The samples of one rank, as if it were the only one."""
    wanted = [number for number, key in enumerate(batch.keys) if is_sample(key.role, key.slot)]
    for row in np.flatnonzero(np.isin(batch.key, wanted)).tolist():
        value = int(batch.h[row]), int(batch.s[row])
        yield SampleSeen(batch.key_of(row), (0, int(batch.microbatch[row])), value)


def _added(values: Collection[tuple[int, int]]) -> tuple[int, int]:
    return sum(h for h, _ in values) % FINGERPRINT_PRIME, sum(s for _, s in values) % (1 << 64)


def _in_order(held: Held) -> Iterator[tuple[Place, int, Sample]]:
    # By micro-batch first: that is how a run of one rank would have met them.
    for place in sorted(held, key=lambda place: (place[1], place[0])):
        for i, sample in enumerate(held[place]):
            yield place, i, sample


def _connected(held: tuple[Held, Held]) -> list[tuple[list[Place], list[Place]]]:
    """The places of both sides that share samples, in the order of the baseline."""
    parent: dict[_Node, _Node] = {}
    for side in (0, 1):
        for place, _, _ in _in_order(held[side]):
            parent.setdefault((side, place), (side, place))

    def root(node: _Node) -> _Node:
        while parent[node] != node:
            node = parent[node]
        return node

    where: dict[tuple[Sample, int], Place] = {}
    copies: Counter[Sample] = Counter()
    for place, _, sample in _in_order(held[0]):
        where[sample, copies[sample]] = place
        copies[sample] += 1
    copies.clear()
    for place, _, sample in _in_order(held[1]):
        partner = where.get((sample, copies[sample]))
        copies[sample] += 1
        if partner is not None:
            parent[root((1, place))] = root((0, partner))
    units: dict[_Node, tuple[list[Place], list[Place]]] = {}
    for node in parent:  # the baseline's come first
        units.setdefault(root(node), ([], []))[node[0]].append(node[1])
    return _partnered(list(units.values()))


def _partnered(
    units: list[tuple[list[Place], list[Place]]],
) -> list[tuple[list[Place], list[Place]]]:
    """Units of one run alone are taken for partners if the other has as many: to be compared."""
    left = [unit for unit in units if not unit[1]]
    strange = [unit for unit in units if not unit[0]]
    if len(left) != len(strange):
        return units
    for mine, theirs in zip(left, strange, strict=True):
        mine[1].extend(theirs[1])
    return [unit for unit in units if unit[0]]


def _number_samples(
    number: int,
    places: tuple[list[Place], list[Place]],
    held: tuple[Held, Held],
    sides: tuple[SideUnits, SideUnits],
) -> None:
    """Give the samples of a unit their positions: equal ones the same, the others in order."""
    mine, theirs = (
        list(_in_order({place: held[side][place] for place in places[side]})) for side in (0, 1)
    )
    free: defaultdict[Sample, list[int]] = defaultdict(list)
    for position, (_, _, sample) in enumerate(mine):
        free[sample].append(position)
    found = [free[sample].pop(0) if free[sample] else NONE for _, _, sample in theirs]
    left = sorted(position for positions in free.values() for position in positions)
    others = iter([*left, *range(len(mine), len(mine) + len(theirs))])
    found = [next(others) if at == NONE else at for at in found]
    for side, listed, at in ((0, mine, range(len(mine))), (1, theirs, found)):
        for place in places[side]:
            sides[side].number[place] = number
            sides[side].positions[place] = [0] * len(held[side][place])
        for (place, i, _), position in zip(listed, at, strict=True):
            sides[side].positions[place][i] = position


def _number_others(places: Collection[Place], side: SideUnits, unused: int) -> None:
    """Places where no sample was seen: outside of micro-batches, or told apart by place alone."""
    for place in places:
        dp, microbatch = place
        other = NONE if microbatch == NONE else unused + 1024 * dp + microbatch
        side.number.setdefault(place, other)
