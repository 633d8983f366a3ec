"""What invariants find: how often they held, what they could not be applied to, what broke.

A broken place is kept once, where it broke first; its further breaks are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from upguard_plugin.invariants.events import Place, RankEvents, StepEvents
from upguard_plugin.records import EventKey


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """A tensor that takes part in a break."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    h: int


@dataclass(frozen=True, slots=True)
class Break:
    """An invariant that does not hold, at the first place where it does not."""

    invariant: str
    place: Place
    key: EventKey
    ranks: tuple[int, ...]
    tensors: tuple[SeenTensor, ...]
    explanation: str  # one sentence
    producer: Place | None = None  # on the first of `ranks`
    order: int = 0  # how far in the step: the row on the first of `ranks`
    later: int = 0  # how often it broke again at this boundary, role and slot

    @property
    def sentence(self) -> str:
        """The explanation as it stands alone."""
        text = self.explanation
        # A name is left as it is.
        return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


class HasKey(Protocol):
    """Which event keys a check looks at."""

    def has_key(self, key: EventKey) -> bool: ...


@dataclass(slots=True)
class Findings:
    """What one invariant found so far."""

    invariant: str
    selection: HasKey | None = None
    checked: int = 0
    not_applied: Counter[str] = field(default_factory=Counter)  # reason -> how often
    broken: dict[tuple[str, str, str], Break] = field(default_factory=dict)
    suspects: dict[tuple[str, str, str], Break] = field(default_factory=dict)

    def looks_at(self, key: EventKey) -> bool:
        """Whether the user asked for events of this key."""
        return self.selection is None or self.selection.has_key(key)

    def hold(self, events: RankEvents, row: int) -> None:
        """Say that the invariant held for an event."""
        if self.looks_at(events.key(row)):
            self.checked += 1

    def skip(self, events: RankEvents, row: int, reason: str) -> None:
        """Say why the invariant could not be applied to an event."""
        if self.looks_at(events.key(row)):
            self.not_applied[reason] += 1

    def breaks(
        self,
        step: StepEvents,
        sides: Mapping[int, int],
        explanation: str,
        *,
        ranks: tuple[int, ...] | None = None,
        producer: int | None = None,
    ) -> None:
        """Say that the invariant is broken; as `made`."""
        self.add(made(self.invariant, step, sides, explanation, ranks=ranks, producer=producer))

    def add(self, found: Break) -> None:
        """Say that the invariant is broken at a place that was put together before."""
        if self.looks_at(found.key):
            self.checked += 1
            _add(self.broken, found)

    def suspect(self, found: Break) -> None:
        """Say that something looks wrong, although nothing in the run says that it must hold."""
        if self.looks_at(found.key):
            _add(self.suspects, found)


def made(
    invariant: str,
    step: StepEvents,
    sides: Mapping[int, int],
    explanation: str,
    *,
    ranks: tuple[int, ...] | None = None,
    producer: int | None = None,
) -> Break:
    """A break with its place.

    sides: rank -> row of the tensors that show it; the place is that of the first of `ranks` (all
    of `sides` by default) that has one. producer: a row on that same rank.
    """
    ranks = tuple(sorted(sides)) if ranks is None else ranks
    first = next((rank for rank in ranks if rank in sides), min(sides))
    events, row = step.ranks[first], sides[first]
    return Break(
        invariant,
        events.place(row),
        events.key(row),
        ranks,
        tuple(_seen(step.ranks[rank], sides[rank]) for rank in sorted(sides)),
        explanation,
        None if producer is None else events.place(producer),
        order=row,
    )


def in_order(breaks: Iterable[Break]) -> list[Break]:
    """By step, then by how far in the step they stand."""
    return sorted(breaks, key=lambda one: (one.place.step, one.order))


class Invariant:
    """Something that must hold. A subclass names it and looks at the steps in order."""

    name: str
    needs_one_rank: bool = False  # a rank can check it alone, while it trains
    remembers: bool = False  # it compares steps with earlier ones: it must see all of them

    def look(self, step: StepEvents, found: Findings) -> None:
        """Check one step of all ranks."""
        raise NotImplementedError

    def finish(self, found: Findings) -> None:
        """Check what only the whole run can tell."""


def _seen(events: RankEvents, row: int) -> SeenTensor:
    key = events.key(row)
    return SeenTensor(events.rank, key.dtype, key.shape, int(events.batch.h[row]))


def _add(table: dict[tuple[str, str, str], Break], found: Break) -> None:
    place = (found.place.boundary, found.place.role, found.place.slot)
    first = table.setdefault(place, found)
    if first is not found:
        table[place] = replace(first, later=first.later + 1)
