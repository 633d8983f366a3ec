"""One step of all ranks as the events of the logical tensors.

In:  the batches of all ranks in a step, their layouts, the numbers of their micro-batches.
Out: `LogicalEvent`s with whole tensors, as a run on one rank would have recorded them; and what
     cannot be merged, with the reason.

Parts are added up by their placements. Replicas must agree; where they do not, there is no logical
tensor, and the event gets a fingerprint that no tensor has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from upguard_plugin.compare.keys import is_collective, is_operator
from upguard_plugin.errors import PlacementError
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey, Layout, Piece, Placement
from upguard_plugin.trace.batch import NONE, EventBatch

STATES = ("param", "grad", "main_grad", "master", "optimizer_state", "buffer", "rng")
_SAID_BY_EVERY_RANK = ("scalar", "data", "sample")  # not split unless a placement says so
_GRADIENTS = ("grad", "main_grad")
_GRADIENT_LOOKS = frozenset(("grad_sync", role) for role in _GRADIENTS)
_BACKWARD = ("backward", "recompute", "accumulate")

# (phase, boundary, role, slot, moment), micro-batch, call
Name = tuple[tuple[str, str, str, str, str | None], int, int]
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's event."""

    rank: int
    row: int
    batch: EventBatch
    key: EventKey

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


@dataclass(frozen=True, slots=True)
class LogicalStep:
    """What a step holds, by name."""

    events: Mapping[Name, LogicalEvent]
    left_out: Mapping[Name, str]  # why they cannot be merged


def merge_step(
    batches: Mapping[int, EventBatch],
    layouts: Mapping[int, Layout],
    units: Mapping[tuple[int, int], int],
) -> LogicalStep:
    """Merge what all ranks saw of a step. No torch; one pass over the events."""
    parts: dict[Name, list[Part]] = {}
    left_out: dict[Name, str] = {}
    for rank in sorted(batches):
        batch, dp = batches[rank], dp_index(layouts[rank])
        first_look = _GRADIENT_LOOKS.isdisjoint((key.phase, key.role) for key in batch.keys)
        for row, number in enumerate(batch.key.tolist()):
            key = batch.keys[number]
            name = _name(key, batch, row, units, dp)
            if first_look and name[0][0] == "clip" and key.role in _GRADIENTS and name[2] == 0:
                # One rank has nothing to synchronise: its first look is the same one.
                name = (("grad_sync", *name[0][1:]), *name[1:])
            if is_collective(key) or is_operator(key):
                left_out[name] = "collectives and operators are those of a layout"
            elif key.role == "rng":
                left_out[name] = "random states are those of a layout"
            else:
                parts.setdefault(name, []).append(Part(rank, row, batch, key))
    events = {}
    for name, found in parts.items():
        try:
            events[name] = _merged(name, found, layouts)
        except PlacementError as error:
            left_out[name] = error.sentence
    return LogicalStep(events, left_out)


def dp_index(layout: Layout) -> int:
    """Which share of the samples the rank computes."""
    axis = layout.axis("dp")
    return 0 if axis is None else axis.index


def _name(
    key: EventKey, batch: EventBatch, row: int, units: Mapping[tuple[int, int], int], dp: int
) -> Name:
    microbatch, call, phase = int(batch.microbatch[row]), int(batch.call[row]), key.phase
    whole_step = key.role in STATES and phase != "accumulate"
    if whole_step and phase == "forward":
        call = 0  # a weight in use: the first use on each rank
    if not whole_step and not (microbatch == NONE and phase in ("start", "clip", "optimizer")):
        microbatch = units[dp, microbatch]
    elif whole_step:
        microbatch = NONE
    return (phase, key.boundary, key.role, key.slot, key.moment), microbatch, call


def _merged(name: Name, parts: Sequence[Part], layouts: Mapping[int, Layout]) -> LogicalEvent:
    """Raises PlacementError, with the reason as its sentence, if the parts make no whole."""
    (phase, *_), microbatch, call = name
    first = parts[0]
    shape, (h, s) = _value(parts, layouts)
    key = replace(first.key, phase=phase, shape=shape, placement=None, group=None, op=None)
    batch = first.batch
    number = None if batch.value is None else float(batch.value[first.row])
    return LogicalEvent(
        key, microbatch, call, h, s, number, _order(phase, microbatch, first, layouts),
        tuple(sorted({part.rank for part in parts})),
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
