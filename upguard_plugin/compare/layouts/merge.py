"""One step of all ranks as the events of the logical tensors.

In:  the batches of all ranks in a step, their layouts, the numbers of their micro-batches.
Out: `LogicalEvent`s with whole tensors, as a run on one rank would have recorded them; and what
     cannot be merged, with the reason.

parts.py says how the parts of one tensor make a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan

from upguard_plugin.compare.keys import is_collective, is_operator
from upguard_plugin.compare.layouts.parts import Part, Whole, whole_of
from upguard_plugin.compare.layouts.sums import RankSums, Sizes
from upguard_plugin.errors import PlacementError
from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace.batch import NONE, EventBatch

STATES = ("param", "grad", "main_grad", "master", "optimizer_state", "buffer", "rng")
_ENDS = {"input": min, "grad_input": min, "output": max, "grad_output": max}  # role -> its stage
_BACKWARD = ("backward", "recompute", "accumulate")

# (phase, boundary, role, slot, moment), micro-batch, call
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
        sums = RankSums(batch)
        for row, number in enumerate(batch.key.tolist()):
            key = batch.keys[number]
            name = _name(key, batch, row, units, dp)
            if is_collective(key) or is_operator(key):
                sums.finish(row, key)
                left_out[name] = "collectives and operators are those of a layout"
            elif key.role == "rng":
                left_out[name] = "random states are those of a layout"
            else:
                part = Part(rank, row, batch, key, sums.behind(row, key))
                parts.setdefault(name, []).append(part)
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
    if key.role in ("grad", "main_grad") and phase == "clip" and call == 0:
        phase = "grad_sync"  # one rank has nothing to synchronise: its first look is the same one
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
    parts = _of_stage(parts, layouts)
    first = parts[0]
    whole = whole_of(parts, layouts)
    key = replace(first.key, phase=phase, shape=whole.shape, placement=None, group=None, op=None)
    sums = max((part.sums for part in parts), key=len)
    if whole.num_summands > 1:
        sums = (*sums, whole.num_summands)
    return LogicalEvent(
        key, microbatch, call, whole, _number(first), _order(phase, microbatch, first, layouts),
        tuple(sorted({part.rank for part in parts})), sums,
    )  # fmt: skip


def _of_stage(parts: Sequence[Part], layouts: Mapping[int, Layout]) -> Sequence[Part]:
    """What enters and leaves a module that is cut into stages, as the model or its decoder."""
    end = _ENDS.get(parts[0].key.role)
    if end is None:
        return parts
    stage = end(_stage(layouts[part.rank]) for part in parts)
    return [part for part in parts if _stage(layouts[part.rank]) == stage]


def _stage(layout: Layout) -> int:
    axis = layout.axis("pp")
    return 0 if axis is None else axis.index


def _number(part: Part) -> float | None:
    if part.batch.value is None or isnan(part.batch.value[part.row]):
        return None
    return float(part.batch.value[part.row])


def _order(phase: str, microbatch: int, part: Part, layouts: Mapping[int, Layout]) -> Order:
    """Where the event stands in the step of a run on one rank: stages in line."""
    stage = _stage(layouts[part.rank])
    seq = int(part.batch.seq[part.row])
    if phase == "start":
        return (0, 0, 0, stage, seq)
    if microbatch != NONE or phase in ("forward", "eval"):
        backward = phase in _BACKWARD
        return (1, max(microbatch, 0), int(backward), -stage if backward else stage, seq)
    return (2, 0, 0, stage, seq)
