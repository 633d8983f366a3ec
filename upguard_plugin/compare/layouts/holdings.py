"""Who holds what of a step: the plan by which the ranks of one process are put together.

In:  the batches of some ranks in a step, and their layouts.
Out: a `Plan`: the pieces of logical tensors that these ranks hold, and for each event its piece.

A plan depends on keys, micro-batches and calls only, not on values. Most steps of a training are
alike in these, so that a plan is made once and serves many steps; `structure_of` tells. Replicas of
a piece, on whatever rank, are one holding. What unit a micro-batch belongs to is not known here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import is_collective, is_operator
from upguard_plugin.compare.layouts.stages import Place as Stage
from upguard_plugin.compare.layouts.stages import RankStages
from upguard_plugin.compare.layouts.sums import RankSums, Sizes
from upguard_plugin.compare.layouts.units import Place
from upguard_plugin.records import EventKey, Layout, Placement
from upguard_plugin.trace.batch import NONE, EventBatch

Ints = npt.NDArray[np.int64]
What = tuple[str, str, str, str, str | None]  # phase, boundary, role, slot, moment

STATES = ("param", "grad", "main_grad", "master", "optimizer_state", "buffer", "rng")
GRADIENTS = ("grad", "main_grad")
OF_A_LAYOUT = "collectives and operators are those of a layout"
OF_RANDOM_STATES = "random states are those of a layout"
_GRADIENT_LOOKS = frozenset(("grad_sync", role) for role in GRADIENTS)
_OF_WHOLE_STEP: Place = (0, NONE)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank calls an event, and where."""

    what: What
    place: Place  # data-parallel index and micro-batch; of a state, that of the whole step
    call: int


@dataclass(slots=True)
class Holding:
    """A piece of a logical tensor, and who holds it."""

    seen: Seen
    stage: Stage
    key: EventKey  # as its first holder has it
    summand: int  # which of how many partial sums it belongs to; (0, 1): it is none
    num_summands: int
    is_whole: bool  # its first holder computes whole tensors
    first: tuple[int, int]  # rank and row
    ranks: list[int]
    sums: Sizes  # sizes of the groups whose sums went into it: of its holders', the most
    sums_at: tuple[int, int]  # rank and row of the first that has these
    num_events: int = 1

    def add(self, rank: int, row: int, sums: Sizes) -> None:
        """One more event of it, of this rank or a later one."""
        self.num_events += 1
        if self.ranks[-1] != rank:
            self.ranks.append(rank)
        if len(sums) > len(self.sums):
            self.sums, self.sums_at = sums, (rank, row)


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """Which events of a rank belong to which holding."""

    rows: Ints
    holding: Ints  # of each row
    lead: Ints  # rows of the first event of each holding that the rank has
    of_lead: Ints  # these holdings, each once


@dataclass(slots=True)
class Plan:
    """How the ranks of one process are put together in steps of one structure."""

    holdings: list[Holding] = field(default_factory=list)
    left_out: dict[Seen, str] = field(default_factory=dict)  # why they are no parts of tensors
    places: set[Place] = field(default_factory=set)  # of all events

    @property
    def size(self) -> int:
        return len(self.holdings) + len(self.left_out)


Structure = tuple[Hashable, ...]


def structure_of(batches: Mapping[int, EventBatch]) -> Structure:
    """What a plan depends on. Batches of a rank share their table of keys from step to step."""
    return tuple((rank, id(batch.keys), _digest(batch)) for rank, batch in batches.items())


def _digest(batch: EventBatch) -> bytes:
    columns = (batch.key, batch.microbatch, batch.call)
    taken = blake2b(digest_size=16)
    for column in columns:
        taken.update(np.ascontiguousarray(column).tobytes())
    return taken.digest()


def plan_of(
    batches: Mapping[int, EventBatch], layouts: Mapping[int, Layout]
) -> tuple[Plan, list[RankRows]]:
    """The plan, and the events of each rank in it. batches: in order of the ranks."""
    index = _Index()
    rows = [
        _Planner(index, rank, batch, layouts[rank]).planned() for rank, batch in batches.items()
    ]
    return index.plan, rows


def dp_index(layout: Layout) -> int:
    """Which share of the samples the rank computes."""
    axis = layout.axis("dp")
    return 0 if axis is None else axis.index


def summand_of(placement: Placement | None, layout: Layout) -> tuple[int, int]:
    """Which of how many partial sums a rank holds; (0, 1) for what is no partial sum."""
    place, num_summands = 0, 1
    for name in () if placement is None else placement.partial:
        axis = layout.axis(name) or layout.axis(name, "expert")
        if axis is not None:
            place, num_summands = place * axis.size + axis.index, num_summands * axis.size
    return place, num_summands


@dataclass(frozen=True, slots=True)
class _KeyFacts:
    """What is the same for all events of a key on a rank."""

    reason: str | None  # why it is no part of a tensor
    what: What
    is_state: bool
    form: int  # replicas have the same
    summand: int
    num_summands: int


@dataclass(slots=True)
class _Index:
    """A plan that is being made."""

    plan: Plan = field(default_factory=Plan)
    numbers: dict[Hashable, int] = field(default_factory=dict)  # of holdings
    forms: dict[Hashable, int] = field(default_factory=dict)
    # Keys of a table share their placements, and hashing those takes long. The batches, which the
    # plan is made of, keep them alive.
    placements: dict[int, int] = field(default_factory=dict)

    def form(self, placement: Placement | None) -> int:
        """A number that placements share where they are of one part."""
        number = self.placements.get(id(placement))
        if number is None:
            held: Hashable = placement
            if placement is not None:
                shape, pieces = placement.logical_shape, placement.pieces
                held = (shape, pieces, placement.sharded, placement.partial)
            number = self.forms.setdefault(held, len(self.forms))
            self.placements[id(placement)] = number
        return number


class _Planner:
    """Goes through the events of one rank."""

    def __init__(self, index: _Index, rank: int, batch: EventBatch, layout: Layout) -> None:
        self._plan, self._index = index.plan, index
        self._rank, self._batch, self._layout = rank, batch, layout
        self._dp = dp_index(layout)
        self._is_whole = all(
            axis.size == 1 for axis in layout.axes if axis.name not in ("dp", "pp", "vpp")
        )
        # One rank has nothing to synchronise: its first look at a gradient is the same one.
        self._looks_late = _GRADIENT_LOOKS.isdisjoint((key.phase, key.role) for key in batch.keys)
        self._facts: dict[int, _KeyFacts] = {}

    def planned(self) -> RankRows:
        batch, sums = self._batch, RankSums(self._batch, self._layout)
        stages = RankStages(self._layout)
        numbers = batch.key.tolist()
        calls, microbatches = batch.call.tolist(), batch.microbatch.tolist()
        self._plan.places.update((self._dp, microbatch) for microbatch in set(microbatches))
        rows, holdings = [], []
        for row, number in enumerate(numbers):
            key, facts = batch.keys[number], self._facts_of(number)
            stage, boundary, call = stages.place(key, microbatches[row], calls[row])
            if facts.reason is not None:
                if facts.reason is OF_A_LAYOUT:
                    sums.finish(row, key)
                seen = self._seen(facts, boundary, microbatches[row], call)
                self._plan.left_out.setdefault(seen, facts.reason)
            elif not stages.is_between(stage, boundary, key.role):
                place = (boundary, microbatches[row], call, stage)
                rows.append(row)
                holdings.append(self._held(row, facts, place, sums.behind(row, key)))
        holding = np.array(holdings, np.int64)
        of_lead, lead = np.unique(holding, return_index=True)
        row_numbers = np.array(rows, np.int64)
        return RankRows(row_numbers, holding, row_numbers[lead], of_lead)

    def _held(
        self, row: int, facts: _KeyFacts, place: tuple[str, int, int, Stage], sums: Sizes
    ) -> int:
        boundary, microbatch, call, stage = place
        seen = self._seen(facts, boundary, microbatch, call)
        name = (seen.what, seen.place, seen.call, stage, facts.form)
        number = self._index.numbers.setdefault(name, len(self._index.numbers))
        holdings = self._plan.holdings
        if number < len(holdings):
            holdings[number].add(self._rank, row, sums)
            return number
        at = (self._rank, row)
        holdings.append(
            Holding(
                seen, stage, self._batch.key_of(row), facts.summand, facts.num_summands,
                self._is_whole, at, [self._rank], sums, at,
            )
        )  # fmt: skip
        return number

    def _seen(self, facts: _KeyFacts, boundary: str, microbatch: int, call: int) -> Seen:
        what = facts.what
        if boundary != what[1]:
            what = (what[0], boundary, *what[2:])
        if facts.is_state and what[0] == "forward":
            call = 0  # a weight in use: the first use on each rank
        if self._looks_late and what[0] == "clip" and what[2] in GRADIENTS and call == 0:
            what = ("grad_sync", *what[1:])
        return Seen(what, _OF_WHOLE_STEP if facts.is_state else (self._dp, microbatch), call)

    def _facts_of(self, number: int) -> _KeyFacts:
        known = self._facts.get(number)
        if known is None:
            known = self._facts[number] = self._looked_up(self._batch.keys[number])
        return known

    def _looked_up(self, key: EventKey) -> _KeyFacts:
        summand = summand_of(key.placement, self._layout)
        form = (key.dtype, key.shape, self._index.form(key.placement), *summand)
        return _KeyFacts(
            OF_A_LAYOUT if is_collective(key) or is_operator(key)
            else OF_RANDOM_STATES if key.role == "rng" else None,
            (key.phase, key.boundary, key.role, key.slot, key.moment),
            key.role in STATES and key.phase != "accumulate",
            self._index.forms.setdefault(form, len(self._index.forms)),
            *summand,
        )  # fmt: skip
