"""One step of a run, as invariants look at it.

In:  the `EventBatch` of each rank.
Out: rows by what their keys say, and what all ranks call the same event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import EventKey, Group, Layout, Source
from upguard_plugin.trace.batch import NONE, EventBatch

Wanted = Callable[[EventKey], bool]
Content = tuple[int, int, str]  # h, s, dtype: equal for tensors with equal bits


@dataclass(frozen=True, slots=True)
class Place:
    """Where an event stands in a run."""

    step: int
    iteration: int | None
    microbatch: int | None
    phase: str
    boundary: str
    operator: str | None
    role: str
    slot: str
    call: int
    moment: str | None
    group: Group | None
    group_seq: int | None
    source: Source | None


@dataclass(slots=True)
class KeyTables:
    """Which keys of a rank's table are wanted; asked once per key, not once per event."""

    _masks: dict[tuple[int, Wanted], list[bool]] = field(default_factory=dict)
    _tables: dict[int, Sequence[EventKey]] = field(default_factory=dict)  # keeps the ids their own

    def mask(self, keys: Sequence[EventKey], wanted: Wanted) -> npt.NDArray[np.bool_]:
        """One answer per key; the table may have grown since the last call."""
        self._tables[id(keys)] = keys
        known = self._masks.setdefault((id(keys), wanted), [])
        known.extend(bool(wanted(key)) for key in keys[len(known) :])
        return np.array(known, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class RankEvents:
    """One step of one rank."""

    rank: int
    layout: Layout
    batch: EventBatch
    tables: KeyTables = field(default_factory=KeyTables)
    level: str = "module"

    def rows(self, wanted: Wanted) -> list[int]:
        """The rows whose key is wanted, in program order. wanted: a function that stays."""
        if not len(self.batch.keys):
            return []
        mask = self.tables.mask(self.batch.keys, wanted)
        return [int(row) for row in np.flatnonzero(mask[self.batch.key])]

    def key(self, row: int) -> EventKey:
        return self.batch.key_of(row)

    def content(self, row: int) -> Content:
        """What is equal for two tensors with equal bits, whatever their shapes."""
        return int(self.batch.h[row]), int(self.batch.s[row]), self.key(row).dtype

    def is_zero(self, row: int) -> bool:
        """Whether every bit of the tensor is 0 (or it has no element)."""
        return int(self.batch.h[row]) == 0 and int(self.batch.s[row]) == 0

    def microbatch(self, row: int) -> int:
        return int(self.batch.microbatch[row])

    def call(self, row: int) -> int:
        return int(self.batch.call[row])

    def group_seq(self, row: int) -> int:
        return NONE if self.batch.group_seq is None else int(self.batch.group_seq[row])

    def place(self, row: int) -> Place:
        key = self.key(row)
        return Place(
            self.batch.step,
            self.batch.iteration,
            _or_none(self.microbatch(row)),
            key.phase,
            key.boundary,
            key.operator,
            key.role,
            key.slot,
            self.call(row),
            key.moment,
            key.group,
            _or_none(self.group_seq(row)),
            key.source,
        )


@dataclass(frozen=True, slots=True)
class StepEvents:
    """One step of all ranks that recorded it."""

    step: int
    ranks: Mapping[int, RankEvents]

    def __iter__(self) -> Iterator[RankEvents]:
        return iter(self.ranks.values())


Sides = dict[int, int]  # rank -> row


def same_events(
    step: StepEvents, wanted: Wanted, name: Callable[[EventKey], Hashable]
) -> dict[Hashable, Sides]:
    """What ranks recorded under the same name, micro-batch and call, n-th time in the step.

    Returns name -> the row of each rank that has such an event, in the lowest rank's order.
    """
    found: dict[Hashable, Sides] = {}
    for events in step:
        times: Counter[Hashable] = Counter()
        for row in events.rows(wanted):
            event = (name(events.key(row)), events.microbatch(row), events.call(row))
            found.setdefault((event, times[event]), {})[events.rank] = row
            times[event] += 1
    return found


def odd_ones(contents: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks that are not with the majority; all of them where there is none."""
    counted = Counter(contents.values())
    most, votes = counted.most_common(1)[0]
    if 2 * votes <= len(contents):
        return tuple(sorted(contents))
    return tuple(sorted(rank for rank, content in contents.items() if content != most))


def named_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1" or "ranks 0, 2"."""
    listed = sorted(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}"


def unequal(odd: Collection[int], ranks: Collection[int]) -> str:
    """How the odd ones among some ranks stand to the others."""
    others = set(ranks) - set(odd)
    if not others:
        return f"{named_ranks(odd)} differ"
    have = "has" if len(odd) == 1 else "have"
    return f"{named_ranks(odd)} {have} other bits than {named_ranks(others)}"


def what(key: EventKey) -> str:
    """A tensor in words: "parameter fc.weight", "input 0 of all_gather[dp]"."""
    plain = _PLAIN.get(key.role)
    return f"{key.role} {key.slot} of {key.boundary}" if plain is None else plain + key.boundary


_PLAIN = {
    "param": "parameter ",
    "grad": "gradient of ",
    "main_grad": "main gradient of ",
    "master": "master of ",
    "buffer": "buffer ",
    "scalar": "scalar ",
    "data": "batch ",
    "rng": "random state of ",
}


def _or_none(number: int) -> int | None:
    return None if number == NONE else number
