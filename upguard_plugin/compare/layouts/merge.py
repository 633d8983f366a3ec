"""One step of all ranks as the events of the logical tensors.

In:  the batches of all ranks in a step, their layouts, the numbers of their micro-batches.
Out: `LogicalEvent`s with whole tensors, as a run on one rank would have recorded them; and what
     cannot be merged, with the reason.

Parts are added up by their placements. Replicas must agree; where they do not, there is no logical
tensor, and the event gets a fingerprint that no tensor has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from upguard_plugin.compare.keys import is_collective, is_operator
from upguard_plugin.compare.layouts.shares import sum_of, value_of
from upguard_plugin.compare.layouts.units import Place, SideUnits
from upguard_plugin.compare.origin import ROOT
from upguard_plugin.errors import PlacementError
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.placement_grammar import parse_placement
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey, Layout, Piece, Placement
from upguard_plugin.trace.batch import NONE, EventBatch

STATES = ("param", "grad", "main_grad", "master", "optimizer_state", "buffer", "rng")
_SAID_BY_EVERY_RANK = ("scalar", "data", "sample")  # not split unless a placement says so
_BACKWARD = ("backward", "recompute", "accumulate")

OTHER_GROUPS = "the runs put the same samples into other micro-batches"
_OF_A_SAMPLE = re.compile(r"(.*\[)(\d+)(\])$")  # a slot: "0[3]" is sample 3 of slot "0"

# (phase, boundary, role, slot, moment), unit, call
Name = tuple[tuple[str, str, str, str, str | None], int, int]
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's event."""

    rank: int
    row: int
    batch: EventBatch
    key: EventKey
    place: Place

    @property
    def value(self) -> tuple[int, int]:
        return int(self.batch.h[self.row]), int(self.batch.s[self.row])


@dataclass(frozen=True, slots=True)
class LogicalEvent:
    """An event of a logical tensor."""

    key: EventKey  # with the logical shape, without a placement
    microbatch: int
    call: int
    h: int
    s: int
    number: float | None  # of a scalar
    order: Order
    ranks: tuple[int, ...]  # that hold a part or a replica
    num_shares: int = 1  # numbers that were added up


@dataclass(frozen=True, slots=True)
class LogicalStep:
    """What a step holds, by name."""

    events: Mapping[Name, LogicalEvent]
    left_out: Mapping[Name, str]  # why they cannot be merged


def merge_step(
    batches: Mapping[int, EventBatch],
    layouts: Mapping[int, Layout],
    units: SideUnits,
    joined: Collection[int] = (),
    in_line: Collection[int] = (),
) -> LogicalStep:
    """Merge what all ranks saw of a step. No torch; one pass over the events.

    joined: units that are not one micro-batch of one place in both runs. in_line: units whose
    parts on all ranks are one batch in order.
    """
    parts: dict[Name, list[Part]] = {}
    left_out: dict[Name, str] = {}
    for rank in sorted(batches):
        batch, dp = batches[rank], dp_index(layouts[rank])
        is_stage = _size(layouts[rank], "pp") > 1
        for row, number in enumerate(batch.key.tolist()):
            key, place = batch.keys[number], (dp, int(batch.microbatch[row]))
            name = _name(key, place, int(batch.call[row]), units)
            if is_collective(key) or is_operator(key):
                left_out[name] = "collectives and operators are those of a layout"
            elif key.role == "rng":
                left_out[name] = "random states are those of a layout"
            elif key.boundary == ROOT and is_stage:
                left_out[name] = "the model of a rank is one of several stages"
            else:
                parts.setdefault(name, []).append(Part(rank, row, batch, key, place))
    events = {}
    for name, found in parts.items():
        try:
            if name[1] != NONE and not is_of_a_sample(name):
                _check_is_whole(found, name[1] in joined, name[1] in in_line)
            if name[0][0] == "accumulate":
                _check_is_summed(found)
            events[name] = _merged(name, found, layouts)
        except PlacementError as error:
            left_out[name] = error.sentence
    return LogicalStep(events, left_out)


def dp_index(layout: Layout) -> int:
    """Which share of the samples the rank computes."""
    axis = layout.axis("dp")
    return 0 if axis is None else axis.index


def _name(key: EventKey, place: Place, call: int, units: SideUnits) -> Name:
    (_, microbatch), phase, slot = place, key.phase, key.slot
    whole_step = key.role in STATES and phase != "accumulate"
    if key.role in ("grad", "main_grad") and phase == "clip" and call == 0:
        phase = "grad_sync"  # one rank has nothing to synchronise: its first look is the same one
    if whole_step and phase == "forward":
        call = 0  # a weight in use: the first use on each rank
    if not whole_step and not (microbatch == NONE and phase in ("start", "clip", "optimizer")):
        slot = _slot_in_unit(key, place, units)
        microbatch = units.number[place]
    elif whole_step:
        microbatch = NONE
    return (phase, key.boundary, key.role, slot, key.moment), microbatch, call


def _slot_in_unit(key: EventKey, place: Place, units: SideUnits) -> str:
    """The slot, with the number that a sample has in its unit."""
    if key.role == "sample":
        return str(units.position(place, int(key.slot)))
    if not key.slot.endswith("]"):
        return key.slot
    found = _OF_A_SAMPLE.fullmatch(key.slot)
    return key.slot if found is None else f"{found[1]}{units.position(place, int(found[2]))}]"


def is_of_a_sample(name: Name) -> bool:
    """Whether the events of that name are those of one sample, whoever computed it."""
    _, _, role, slot, _ = name[0]
    return role == "sample" or (slot.endswith("]") and _OF_A_SAMPLE.fullmatch(slot) is not None)


def _check_is_whole(parts: Sequence[Part], joined: bool, in_line: bool) -> None:
    """Raises PlacementError unless the tensor is that of all samples of a unit, in order."""
    if _summed_axes(parts[0]):
        return
    several = len({part.place for part in parts}) > 1
    placements = [part.key.placement for part in parts]
    cut = all(placement is not None and "dp" in placement.sharded for placement in placements)
    if not joined and not cut:
        return
    # Of a batch, its samples tell more: the ranks that have an other one.
    is_batch = several and parts[0].key.role == "data"
    if not in_line or several != cut or is_batch:
        raise PlacementError(OTHER_GROUPS)


def _check_is_summed(parts: Sequence[Part]) -> None:
    """Raises PlacementError where ranks have other gradients of what they are to have as one.

    They are summed later, and are compared then.
    """
    held: dict[object, set[tuple[int, int]]] = {}
    for part in parts:
        pieces = None if part.key.placement is None else part.key.placement.pieces
        held.setdefault(pieces, set()).add(part.value)
    if any(len(values) > 1 for values in held.values()):
        raise PlacementError("gradients that the ranks have not summed yet")


def _summed_axes(part: Part) -> tuple[str, ...]:
    """The axes over which a number is said to be a partial sum; empty for anything else."""
    placement = part.key.placement
    if part.key.role != "scalar" or placement is None or part.batch.value is None:
        return ()
    return parse_placement(placement.spec).partial if "+" in placement.spec else ()


def _number_of(parts: Sequence[Part], layouts: Mapping[int, Layout]) -> tuple[float | None, int]:
    """A scalar's number, and of how many shares it is the sum."""
    first, axes = parts[0], _summed_axes(parts[0])
    if first.batch.value is None:
        return None, 1
    if not axes:
        return float(first.batch.value[first.row]), 1
    shares: dict[Hashable, set[float]] = {}
    for part in parts:
        assert part.batch.value is not None
        found = (layouts[part.rank].axis(axis) for axis in axes)
        share = (part.place, *(0 if axis is None else axis.index for axis in found))
        shares.setdefault(share, set()).add(float(part.batch.value[part.row]))
    return sum_of(shares), len(shares)


def _merged(name: Name, parts: Sequence[Part], layouts: Mapping[int, Layout]) -> LogicalEvent:
    """Raises PlacementError, with the reason as its sentence, if the parts make no whole."""
    (phase, _, _, slot, _), microbatch, call = name
    first = parts[0]
    number, num_shares = _number_of(parts, layouts)
    if number is not None and _summed_axes(first):
        shape, (h, s) = first.key.shape, value_of(number)
    else:
        shape, (h, s) = _value(parts, layouts)
    key = replace(
        first.key, phase=phase, slot=slot, shape=shape, placement=None, group=None, op=None
    )
    return LogicalEvent(
        key, microbatch, call, h, s, number, _order(phase, microbatch, first, layouts),
        tuple(sorted({part.rank for part in parts})), num_shares,
    )  # fmt: skip


def _value(
    parts: Sequence[Part], layouts: Mapping[int, Layout]
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Shape and fingerprint of the logical tensor."""
    key = parts[0].key
    if len({(part.key.dtype, part.key.placement is None) for part in parts}) > 1:
        raise PlacementError("the ranks' parts have several dtypes, or a placement is missing")
    if key.placement is None:
        return key.shape, _unplaced(parts, layouts)
    held: dict[tuple[Piece, ...], set[tuple[int, int]]] = {}
    placements: dict[tuple[Piece, ...], Placement] = {}
    for part in parts:
        placement = part.key.placement
        assert placement is not None
        sums = [axis for axis in placement.partial if _size(layouts[part.rank], axis) > 1]
        if sums:
            raise PlacementError(f"partial sums over {', '.join(sums)}")
        held.setdefault(placement.pieces, set()).add(part.value)
        placements[placement.pieces] = placement
    check_cover(list(placements.values()), key.boundary)
    shape = next(iter(placements.values())).logical_shape
    return shape, _sum([_agreed(values) for values in held.values()])


def _unplaced(parts: Sequence[Part], layouts: Mapping[int, Layout]) -> tuple[int, int]:
    key = parts[0].key
    values = {part.value for part in parts}
    shapes = {part.key.shape for part in parts}
    if len(parts) == 1 and _is_whole(layouts[parts[0].rank]):
        return parts[0].value
    if key.role in _SAID_BY_EVERY_RANK and len(shapes) == 1:
        if len(values) == 1:
            return parts[0].value
        raise PlacementError(
            "ranks hold other values, and no placement says how they belong together"
        )
    raise PlacementError("no placement is known")


def _is_whole(layout: Layout) -> bool:
    """Whether each rank computes whole tensors, of its own samples."""
    return all(axis.size == 1 for axis in layout.axes if axis.name not in ("dp", "pp", "vpp"))


def _size(layout: Layout, axis: str) -> int:
    found = layout.axis(axis) or layout.axis(axis, "expert")
    return 1 if found is None else found.size


def _agreed(values: set[tuple[int, int]]) -> tuple[int, int]:
    """The value of replicas. Where they disagree, one that no tensor is likely to have."""
    if len(values) == 1:
        return next(iter(values))
    return _sum([(3 * h + 1, 3 * s + 1) for h, s in values])


def _sum(values: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return (
        sum(h for h, _ in values) % FINGERPRINT_PRIME,
        sum(s for _, s in values) % (1 << 64),
    )


def _order(phase: str, microbatch: int, part: Part, layouts: Mapping[int, Layout]) -> Order:
    """Where the event stands in the step of a run on one rank: stages in line."""
    axis = layouts[part.rank].axis("pp")
    stage = 0 if axis is None else axis.index
    seq = int(part.batch.seq[part.row])
    if phase == "start":
        return (0, 0, 0, stage, seq)
    if microbatch != NONE or phase in ("forward", "eval"):
        backward = phase in _BACKWARD
        return (1, max(microbatch, 0), int(backward), -stage if backward else stage, seq)
    return (2, 0, 0, stage, seq)
