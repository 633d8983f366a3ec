"""One step of all ranks as the events of the logical tensors.

In:  the batches of all ranks in a step, their layouts, the numbers of their micro-batches.
Out: `LogicalEvent`s with whole tensors, as a run on one rank would have recorded them; and what
     cannot be merged, with the reason.

parts.py says how the parts of one tensor make a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan

from upguard_plugin.compare.keys import is_collective, is_operator
from upguard_plugin.compare.layouts.parts import Part, Whole, whole_of
from upguard_plugin.compare.layouts.samples import (
    check_is_summed,
    check_is_whole,
    is_of_a_sample,
    slot_in_unit,
)
from upguard_plugin.compare.layouts.shares import sum_of, summed_axes, whole_number
from upguard_plugin.compare.layouts.stages import RankStages
from upguard_plugin.compare.layouts.sums import RankSums, Sizes
from upguard_plugin.compare.layouts.units import SideUnits
from upguard_plugin.errors import PlacementError
from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace.batch import NONE, EventBatch

STATES = ("param", "grad", "main_grad", "master", "optimizer_state", "buffer", "rng")
_ENDS = {"input": min, "grad_input": min, "output": max, "grad_output": max}  # role -> its stage
_GRADIENTS = ("grad", "main_grad")
_GRADIENT_LOOKS = frozenset(("grad_sync", role) for role in _GRADIENTS)
_BACKWARD = ("backward", "recompute", "accumulate")

# (phase, boundary, role, slot, moment), unit, call
Name = tuple[tuple[str, str, str, str, str | None], int, int]
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogicalEvent:
    """An event of a logical tensor."""

    key: EventKey  # with the logical shape, without a placement
    microbatch: int
    call: int
    whole: Whole
    number: float | None  # of a scalar
    order: Order
    ranks: tuple[int, ...]  # that hold a part or a replica
    sums: Sizes  # sizes of the sums over ranks that went into it
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
        sums, stages = RankSums(batch, layouts[rank]), RankStages(layouts[rank])
        first_look = _GRADIENT_LOOKS.isdisjoint((key.phase, key.role) for key in batch.keys)
        for row, number in enumerate(batch.key.tolist()):
            key = batch.keys[number]
            microbatch = int(batch.microbatch[row])
            place, boundary, call = stages.place(key, microbatch, int(batch.call[row]))
            name = _name(key, boundary, (dp, microbatch), call, units)
            if first_look and name[0][0] == "clip" and key.role in _GRADIENTS and name[2] == 0:
                # One rank has nothing to synchronise: its first look is the same one.
                name = (("grad_sync", *name[0][1:]), *name[1:])
            if is_collective(key) or is_operator(key):
                sums.finish(row, key)
                left_out[name] = "collectives and operators are those of a layout"
            elif key.role == "rng":
                left_out[name] = "random states are those of a layout"
            elif not stages.is_between(place, boundary, key.role):
                part = Part(rank, row, batch, key, place, sums.behind(row, key))
                parts.setdefault(name, []).append(part)
    events = {}
    for name, found in parts.items():
        try:
            if name[1] != NONE and not is_of_a_sample(*name[0][2:4]) and not summed_axes(found[0]):
                check_is_whole(found, layouts, name[1] in joined, name[1] in in_line)
            if name[0][0] == "accumulate":
                check_is_summed(found)
            events[name] = _merged(name, found, layouts)
        except PlacementError as error:
            left_out[name] = error.sentence
    return LogicalStep(events, left_out)


def dp_index(layout: Layout) -> int:
    """Which share of the samples the rank computes."""
    axis = layout.axis("dp")
    return 0 if axis is None else axis.index


def _name(
    key: EventKey, boundary: str, place: tuple[int, int], call: int, units: SideUnits
) -> Name:
    (_, microbatch), phase, slot = place, key.phase, key.slot
    whole_step = key.role in STATES and phase != "accumulate"
    if whole_step and phase == "forward":
        call = 0  # a weight in use: the first use on each rank
    if not whole_step and not (microbatch == NONE and phase in ("start", "clip", "optimizer")):
        slot = slot_in_unit(key, place, units)
        microbatch = units.number[place]
    elif whole_step:
        microbatch = NONE
    return (phase, boundary, key.role, slot, key.moment), microbatch, call


def _merged(name: Name, parts: Sequence[Part], layouts: Mapping[int, Layout]) -> LogicalEvent:
    """Raises PlacementError, with the reason as its sentence, if the parts make no whole."""
    (phase, boundary, _, slot, _), microbatch, call = name
    parts = _at_its_end(parts)
    first, number, num_shares = parts[0], _number(parts[0]), 1
    if number is not None and summed_axes(first):
        number, num_shares = sum_of(parts, layouts)
        whole = whole_number(number, first.key.shape)
    else:
        whole = whole_of(parts, layouts)
    key = replace(
        first.key, phase=phase, boundary=boundary, slot=slot, shape=whole.shape,
        placement=None, group=None, op=None,
    )  # fmt: skip
    sums = max((part.sums for part in parts), key=len)
    if whole.num_summands > 1:
        sums = (*sums, whole.num_summands)
    return LogicalEvent(
        key, microbatch, call, whole, number, _order(phase, microbatch, first),
        tuple(sorted({part.rank for part in parts})), sums, num_shares,
    )  # fmt: skip


def _at_its_end(parts: Sequence[Part]) -> Sequence[Part]:
    """What enters or leaves a module that is cut into stages, as the model or its decoder."""
    end = _ENDS.get(parts[0].key.role)
    if end is None:
        return parts
    place = end(part.place for part in parts)
    return [part for part in parts if part.place == place]


def _number(part: Part) -> float | None:
    if part.batch.value is None or isnan(part.batch.value[part.row]):
        return None
    return float(part.batch.value[part.row])


def _order(phase: str, microbatch: int, part: Part) -> Order:
    """Where the event stands in the step of a run on one rank: stages in line."""
    place = (part.place.chunk, part.place.stage)
    seq = int(part.batch.seq[part.row])
    if phase == "start":
        return (0, 0, 0, *place, seq)
    if microbatch != NONE or phase in ("forward", "eval"):
        if phase in _BACKWARD:
            place = (-place[0], -place[1])
        return (1, max(microbatch, 0), int(phase in _BACKWARD), *place, seq)
    return (2, 0, 0, *place, seq)
