"""Replicas agree: what every rank of an axis holds whole has the same bits on each.

Applied to tensors whose placement is declared. An axis called `dp` replicates all state that has
no other placement; in a placement that is given, axes that it does not name hold replicas.
Activations and batches are never replicas over data-parallel axes, and buffers need not be: each
rank may update its own between two broadcasts, whose results are checked with the collectives.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

from upguard_plugin.invariants.events import (
    Sides,
    StepEvents,
    named_ranks,
    odd_ones,
    same_events,
    unequal,
    what,
)
from upguard_plugin.invariants.findings import Break, Findings, Invariant, made
from upguard_plugin.records import EventKey, Layout

_STATE = frozenset({"param", "grad", "main_grad", "master", "optimizer_state"})
_GRADIENTS = frozenset({"grad", "main_grad"})
_AGREED = frozenset({"grad_sync", "clip"})  # phases in which gradients are those of all ranks
_DATA_PARALLEL = frozenset({"dp", "edp"})
_STAGES = frozenset({"pp", "vpp"})  # other parameters, also where their names are the same
_BETWEEN_USES = frozenset({"start", "optimizer", "param_sync", "checkpoint"})  # of weights
_NO_RULE = "*"  # the placement of state that only an axis called `dp` speaks of
_DTENSOR = "dtensor "  # a placement that names every axis of its own mesh, and knows no other
_DTENSOR_AXIS = re.compile(r"(?:^dtensor |,)(\w+):")
_MISSING = "none"  # dtype of a gradient that is not there

Axes = frozenset[tuple[str, str]]  # (name, mesh)


def is_state(key: EventKey) -> bool:
    """State that ranks can hold copies of, at a moment when copies must be equal."""
    if key.role in _GRADIENTS:
        return key.phase in _AGREED
    return key.role in _STATE


def _may_be_replica(key: EventKey) -> bool:
    if key.group is not None:
        return False  # buffers of collectives have invariants of their own
    return is_state(key) or (key.placement is not None and key.role not in _STATE)


def _name(key: EventKey) -> Hashable:
    return key.boundary, key.phase, key.role, key.slot, key.moment


class ReplicasAgree(Invariant):
    """Copies of declared placement are equal; undeclared ones that differ are suspects.

    Weights may be brought together as late as before their next use: what differs after a step is
    broken if it still differs when a module uses it.
    """

    name = "replicas-agree"

    def __init__(self) -> None:
        self._unused: dict[str, Break] = {}  # weights that differ and were not used since
        self._used: set[str] = set()  # weights of which a use was seen
        self._gathers = False  # whether weights were brought together between a step and a use

    def look(self, step: StepEvents, found: Findings) -> None:
        sets = ReplicaSets({events.rank: events.layout for events in step})
        for sides in same_events(step, _may_be_replica, _name).values():
            keys = {rank: step.ranks[rank].key(row) for rank, row in sides.items()}
            placed = {rank: key for rank, key in keys.items() if key.placement is not None}
            if not placed:
                self._undeclared(step, sides, found)
                continue
            for ranks in sets.of(placed):
                self._compare(step, ranks, sides, found)

    def finish(self, found: Findings) -> None:
        for boundary, difference in self._unused.items():
            if boundary in self._used and difference.place.phase == "optimizer":
                found.suspect(difference)  # the run ended before they had to agree
            else:
                found.add(difference)

    def _compare(
        self, step: StepEvents, ranks: tuple[int, ...], sides: Sides, found: Findings
    ) -> None:
        recorded = [rank for rank in ranks if rank in step.ranks]
        mine = {rank: sides[rank] for rank in recorded if rank in sides}
        first, row = step.ranks[next(iter(mine))], next(iter(mine.values()))
        if len(recorded) < len(ranks):
            found.skip(first, row, "a rank that holds the replica was not recorded")
        if len(mine) < len(recorded):
            found.skip(first, row, "a rank that holds the replica has no such event")
        if len(mine) < 2:
            return
        difference = self._difference(step, mine)
        key = first.key(row)
        if key.role != "param":
            if difference is not None:
                found.add(difference)
        elif key.phase in _BETWEEN_USES:
            if difference is not None:
                self._unused.setdefault(key.boundary, difference)
                return
        else:
            self._used.add(key.boundary)
            earlier = self._unused.pop(key.boundary, None)
            if difference is None:
                self._gathers = self._gathers or earlier is not None
            else:
                found.add(difference if self._gathers or earlier is None else earlier)
        if difference is None:
            found.hold(first, row)

    def _difference(self, step: StepEvents, sides: Sides) -> Break | None:
        events = step.ranks
        contents = {
            rank: (*events[rank].content(at), events[rank].key(at).shape)
            for rank, at in sides.items()
        }
        if len(set(contents.values())) == 1:
            return None
        key = events[next(iter(sides))].key(next(iter(sides.values())))
        odd = odd_ones(contents)
        how = unequal(odd, sides)
        missing = [rank for rank, at in sides.items() if events[rank].key(at).dtype == _MISSING]
        if missing:
            how = f"{named_ranks(missing)} {'has' if len(missing) == 1 else 'have'} none"
        sentence = f"{what(key)} must be the same on {named_ranks(sides)}, but {how}."
        return made(self.name, step, sides, sentence, ranks=odd)

    def _undeclared(self, step: StepEvents, sides: Sides, found: Findings) -> None:
        rank, row = next(iter(sides.items()))
        found.skip(step.ranks[rank], row, "no placement is declared")
        if len(sides) < 2:
            return
        keys = [step.ranks[r].key(at) for r, at in sides.items()]
        if len({(key.dtype, key.shape) for key in keys}) > 1 or keys[0].dtype == _MISSING:
            return
        if len({step.ranks[r].content(at) for r, at in sides.items()}) > 1:
            sentence = (
                f"{what(keys[0])} has the same shape on {named_ranks(sides)} but not the same "
                "bits, and no placement says whether it may."
            )
            found.suspect(made(self.name, step, sides, sentence))


class ReplicaSets:
    """Which ranks hold the same part of a tensor."""

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        self._layouts = layouts
        self._sets: dict[Axes, dict[int, tuple[int, ...]]] = {}

    def of(self, keys: Mapping[int, EventKey]) -> list[tuple[int, ...]]:
        """The sets of two or more ranks, from the keys of one event on the ranks that have it."""
        found: dict[tuple[int, ...], None] = {}
        for rank, key in keys.items():
            axes = replicated_axes(key, self._layouts[rank])
            ranks = self._connected(axes).get(rank, (rank,))
            if len(ranks) > 1:
                found[ranks] = None
        return list(found)

    def _connected(self, axes: Axes) -> dict[int, tuple[int, ...]]:
        """rank -> all ranks that are reached along these axes, those not recorded included."""
        if axes in self._sets:
            return self._sets[axes]
        reached: dict[int, set[int]] = {}
        for rank, layout in self._layouts.items():
            for axis in layout.axes:
                if (axis.name, axis.mesh) not in axes:
                    continue
                together = set(axis.ranks) | {rank}
                for other in list(together):
                    together |= reached.get(other, set())
                for other in together:
                    reached[other] = together
        sets = {rank: tuple(sorted(ranks)) for rank, ranks in reached.items()}
        self._sets[axes] = sets
        return sets


def replicated_axes(key: EventKey, layout: Layout) -> Axes:
    """The axes along which a tensor of known placement is held whole by every rank."""
    placement = key.placement
    if placement is None:
        return frozenset()
    split = {*placement.sharded, *placement.partial, *_STAGES}
    if key.role not in _STATE:
        split |= _DATA_PARALLEL
    names = {
        (axis.name, axis.mesh)
        for axis in layout.axes
        if axis.size > 1 and axis.mesh == placement.mesh and axis.name not in split
    }
    if placement.spec == _NO_RULE:
        names = {(name, mesh) for name, mesh in names if name in _DATA_PARALLEL}
    if placement.spec.startswith(_DTENSOR):
        named = set(_DTENSOR_AXIS.findall(placement.spec))
        names = {(name, mesh) for name, mesh in names if name in named}
    return frozenset(names)
