"""Which micro-batch of one run is which of the other, whatever rank computed it.

In:  the `sample` events of all ranks in a step.
Out: a number for each (data-parallel index, micro-batch): the same number in both runs if and only
     if the micro-batches hold the same samples in the same order.

Micro-batches with equal samples (duplicates) are matched in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from upguard_plugin.compare.keys import ROLE_NUMBER
from upguard_plugin.trace.batch import NONE, EventBatch

Place = tuple[int, int]  # data-parallel index, micro-batch as the rank numbers it
Samples = tuple[tuple[str, str, int, int], ...]  # (boundary, slot, h, s) of each sample


class Units:
    """The micro-batches of one step, numbered for both runs."""

    def __init__(
        self,
        baseline: Mapping[int, EventBatch],
        target: Mapping[int, EventBatch],
        dp_index: tuple[Mapping[int, int], Mapping[int, int]],
    ) -> None:
        """baseline, target: the batches of all ranks. dp_index: of each rank, in both runs."""
        held = [
            _samples_by_place(batches, index)
            for batches, index in zip((baseline, target), dp_index, strict=True)
        ]
        self.same_samples = _all_of(held[0]) == _all_of(held[1])
        numbers = {name: number for number, name in enumerate(_named(held[0]))}
        left = [name for name in numbers if name not in _named(held[1])]
        strange = [name for name in _named(held[1]) if name not in numbers]
        if len(left) == len(strange) and not self.same_samples:
            # As many on both sides: taken for partners, so that their samples are compared.
            numbers |= {new: numbers[old] for old, new in zip(left, strange, strict=True)}
        for name in strange:
            numbers.setdefault(name, len(numbers))
        self.baseline = _places(baseline, dp_index[0], held[0], numbers)
        self.target = _places(target, dp_index[1], held[1], numbers)

    @property
    def common(self) -> set[int]:
        """The numbers that both runs have."""
        return set(self.baseline.values()) & set(self.target.values())


def _named(held: Mapping[Place, Samples]) -> dict[tuple[Samples, int], Place]:
    """Places by their samples and, among those with the same ones, their order."""
    copies: Counter[Samples] = Counter()
    named = {}
    # By micro-batch first: that is how a run of one rank would have met them.
    for place in sorted(held, key=lambda place: (place[1], place[0])):
        named[held[place], copies[held[place]]] = place
        copies[held[place]] += 1
    return named


def _all_of(held: Mapping[Place, Samples]) -> Counter[tuple[str, int, int]]:
    """All samples of a step, however they are put together."""
    return Counter((name, h, s) for samples in held.values() for name, _, h, s in samples)


def _places(
    batches: Mapping[int, EventBatch],
    dp_index: Mapping[int, int],
    held: Mapping[Place, Samples],
    numbers: Mapping[tuple[Samples, int], int],
) -> dict[Place, int]:
    """The number of every place where events happened."""
    found = {place: numbers[name] for name, place in _named(held).items()}
    unnamed = 1 + max(numbers.values(), default=NONE)
    for rank, batch in batches.items():
        for microbatch in set(batch.microbatch.tolist()):
            place = (dp_index[rank], microbatch)
            if place not in found:
                # No sample was seen: outside of micro-batches, or told apart by place alone.
                outside = microbatch == NONE
                found[place] = NONE if outside else unnamed + 1024 * dp_index[rank] + microbatch
    return found


def _samples_by_place(
    batches: Mapping[int, EventBatch], dp_index: Mapping[int, int]
) -> dict[Place, Samples]:
    found: dict[Place, dict[tuple[str, str], tuple[int, int]]] = {}
    for rank in sorted(batches):
        batch = batches[rank]
        for row in _rows_of_samples(batch):
            key = batch.key_of(row)
            place = (dp_index[rank], int(batch.microbatch[row]))
            values = found.setdefault(place, {})
            values.setdefault((key.boundary, key.slot), (int(batch.h[row]), int(batch.s[row])))
    return {
        place: tuple((*name, *hashes) for name, hashes in values.items())
        for place, values in found.items()
    }


def _rows_of_samples(batch: EventBatch) -> Iterable[int]:
    keys = batch.keys
    is_sample = [ROLE_NUMBER[key.role] == ROLE_NUMBER["sample"] for key in keys]
    return [row for row, key in enumerate(batch.key.tolist()) if is_sample[key]]
