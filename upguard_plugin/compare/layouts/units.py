"""Which micro-batches of one run hold the samples of which of the other, whatever rank had them.

In:  the `sample` events of all ranks in a step.
Out: units: the smallest sets of micro-batches that hold the same samples in both runs. Each place
     (data-parallel index, micro-batch) belongs to one unit, each of its samples to a position in
     it; both have the same number in both runs.

Where runs cut their batches alike, a unit is one micro-batch on each side. Equal samples
(duplicates) are matched in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from upguard_plugin.compare.run import Run
from upguard_plugin.records import FINGERPRINT_PRIME
from upguard_plugin.trace.batch import NONE, EventBatch

Place = tuple[int, int]  # data-parallel index, micro-batch as the rank numbers it
Sample = tuple[tuple[str, int, int], ...]  # (boundary, h, s) of each of its tensors
Held = Mapping[Place, Sequence[Sample]]

_Node = tuple[int, Place]  # side, place


@dataclass(frozen=True, slots=True)
class SideUnits:
    """The places of one run."""

    number: dict[Place, int] = field(default_factory=dict)  # of the unit
    positions: dict[Place, list[int]] = field(default_factory=dict)  # of samples in their unit

    def position(self, place: Place, sample: int) -> int:
        """Where the sample that a place numbers so stands in its unit."""
        listed = self.positions.get(place, ())
        return listed[sample] if sample < len(listed) else sample


class Units:
    """The micro-batches of one step, put together for both runs."""

    def __init__(
        self,
        baseline: Mapping[int, EventBatch],
        target: Mapping[int, EventBatch],
        dp_index: tuple[Mapping[int, int], Mapping[int, int]],
    ) -> None:
        """baseline, target: the batches of all ranks. dp_index: of each rank, in both runs."""
        held = (_held(baseline, dp_index[0]), _held(target, dp_index[1]))
        counts = [Counter(sample for _, _, sample in _in_order(side)) for side in held]
        self.same_samples = counts[0] == counts[1]
        self.baseline, self.target = sides = SideUnits(), SideUnits()
        units = _connected(held)
        for number, places in enumerate(units):
            _number_samples(number, places, held, sides)
        in_line = [
            all(_is_in_line(one, side) for one, side in zip(places, sides, strict=True))
            for places in units
        ]
        # Those that hold the same batch, in the order of the ranks that hold its parts; and those
        # of which at least one run needs several places, or has another order.
        self.in_line = frozenset(number for number, yes in enumerate(in_line) if yes)
        self.joined = frozenset(
            number
            for number, places in enumerate(units)
            if not in_line[number] or any(len(one) > 1 for one in places)
        )
        # Whether gradients that add up over micro-batches are sums of the same ones at any time.
        self.same_order = _order(self.baseline) == _order(self.target)
        _number_others(baseline, dp_index[0], self.baseline, len(units))
        _number_others(target, dp_index[1], self.target, len(units))


def cut_otherwise(baseline: Run, target: Run) -> bool:
    """Whether the runs cut the same samples into other micro-batches, as their first rank shows."""
    rank = min(set(baseline.ranks) & set(target.ranks), default=None)
    if rank is None:
        return False
    steps = [{entry.step: entry for entry in run.steps(rank)} for run in (baseline, target)]
    first = min(set(steps[0]) & set(steps[1]), default=None)
    if first is None or steps[0][first].digest == steps[1][first].digest:
        return False
    held = [_held({rank: run.read(rank, first)}, {rank: 0}) for run in (baseline, target)]
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


def _held(batches: Mapping[int, EventBatch], dp_index: Mapping[int, int]) -> Held:
    """The samples of each place. Their parts on several ranks are added up."""
    parts: dict[Place, dict[int, dict[str, dict[object, tuple[int, int]]]]] = {}
    for rank in sorted(batches):
        batch = batches[rank]
        is_sample = [key.role == "sample" and is_number(key.slot) for key in batch.keys]
        for row, number in enumerate(batch.key.tolist()):
            if not is_sample[number]:
                continue
            key, place = batch.keys[number], (dp_index[rank], int(batch.microbatch[row]))
            found = parts.setdefault(place, {}).setdefault(int(key.slot), {})
            pieces = None if key.placement is None else key.placement.pieces
            value = (int(batch.h[row]), int(batch.s[row]))
            found.setdefault(key.boundary, {}).setdefault(pieces, value)
    return {
        place: [
            tuple((name, *_added(values.values())) for name, values in sorted(samples[i].items()))
            for i in sorted(samples)
        ]
        for place, samples in parts.items()
    }


def is_number(slot: str) -> bool:
    """Whether a slot is the number of a sample. A damaged trace may hold any text."""
    return slot.isascii() and slot.isdecimal() and len(slot) < 10


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


def _number_others(
    batches: Mapping[int, EventBatch], dp_index: Mapping[int, int], side: SideUnits, unused: int
) -> None:
    """Places where no sample was seen: outside of micro-batches, or told apart by place alone."""
    for rank, batch in batches.items():
        for microbatch in set(batch.microbatch.tolist()):
            place = (dp_index[rank], microbatch)
            other = NONE if microbatch == NONE else unused + 1024 * place[0] + microbatch
            side.number.setdefault(place, other)
