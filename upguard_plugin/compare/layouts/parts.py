"""One logical tensor from the parts that the ranks hold of it.

In:  what all ranks saw of one boundary.
Out: a `Whole`: shape, fingerprint and sketch of the logical tensor.

Parts are added up by their placements. Replicas must agree; where they do not, there is no logical
tensor, and it gets a fingerprint that no tensor has. Partial sums have a sketch, which adds up as
they do, and a fingerprint that only equal partial sums share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.layouts.stages import Place
from upguard_plugin.errors import PlacementError
from upguard_plugin.placement import parse_placement
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey, Layout, Piece, Placement
from upguard_plugin.trace.batch import NONE, EventBatch

Floats = npt.NDArray[np.float64]
Value = tuple[int, int]  # h and s

_SAID_BY_EVERY_RANK = ("scalar", "data", "sample")  # not split unless a placement says so
_TENSOR = re.compile(r"b?float|complex|q?u?int|bool|bits")  # how the dtypes of tensors begin


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's event."""

    rank: int
    row: int
    batch: EventBatch
    key: EventKey
    place: Place
    sums: tuple[int, ...] = ()  # sizes of the groups whose sums went into it

    @property
    def value(self) -> Value:
        return int(self.batch.h[self.row]), int(self.batch.s[self.row])

    @property
    def num_nonfinite(self) -> int:
        return NONE if self.batch.nonfinite is None else int(self.batch.nonfinite[self.row])

    @property
    def sketch(self) -> Floats | None:
        """None where none was taken."""
        if self.batch.sketch is None or np.isnan(self.batch.sketch[self.row, 0]):
            return None
        taken: Floats = self.batch.sketch[self.row]
        return taken


@dataclass(frozen=True, slots=True)
class Whole:
    """The logical tensor."""

    shape: tuple[int, ...]
    value: Value
    sketch: Floats | None
    is_agreed: bool  # replicas are equal
    num_nonfinite: int = NONE
    num_summands: int = 1  # more: it was not added up yet, each rank holds a partial sum
    dims: tuple[str, ...] = ()  # their names in the placement


def whole_of(parts: Sequence[Part], layouts: Mapping[int, Layout]) -> Whole:
    """Raises PlacementError, with the reason as its sentence, if the parts make no whole."""
    key = parts[0].key
    if len({(part.key.dtype, part.key.placement is None) for part in parts}) > 1:
        raise PlacementError("the ranks' parts have several dtypes, or a placement is missing")
    if key.placement is None:
        first = parts[0]
        return Whole(key.shape, _unplaced(parts, layouts), first.sketch, True, first.num_nonfinite)
    # By summand, which is 0 but for partial sums, and by the pieces that a rank holds of it.
    held: dict[tuple[int, tuple[Piece, ...]], list[Part]] = {}
    num_summands = 1
    for part in parts:
        placement = _placement(part)
        summand, num_summands = _summand(placement, layouts[part.rank])
        held.setdefault((summand, placement.pieces), []).append(part)
    summands = {summand for summand, _ in held}
    sketches = [replicas[0].sketch for replicas in held.values()]
    taken = [one for one in sketches if one is not None]
    sketch = np.sum(taken, axis=0) if len(taken) == len(sketches) else None
    if num_summands > 1:
        _check_sum(key, sketch is not None, len(summands) == num_summands)
    for summand in summands:
        mine = [_placement(replicas[0]) for (s, _), replicas in held.items() if s == summand]
        _check_whole(mine, key.boundary)
    values = [
        _scaled(_agreed({part.value for part in replicas}), 2 * summand + 1)
        for (summand, _), replicas in held.items()
    ]
    return Whole(
        key.placement.logical_shape,
        _sum(values),
        sketch,
        all(len({part.value for part in replicas}) == 1 for replicas in held.values()),
        sum(replicas[0].num_nonfinite for replicas in held.values()),
        num_summands,
        _dims(key.placement.spec),
    )


@lru_cache(maxsize=4096)
def _dims(spec: str) -> tuple[str, ...]:
    """The names of the dims of what a rank holds, in order; fused ones are one."""
    if not spec:
        return ()
    terms = parse_placement(spec).views[0].terms
    return tuple("*" if term is None else " ".join(dim.name for dim in term) for term in terms)


def _placement(part: Part) -> Placement:
    assert part.key.placement is not None
    return part.key.placement


@lru_cache(maxsize=1 << 16)
def _is_whole_of(placements: tuple[Placement, ...]) -> bool:
    """Whether the parts make up the whole; they are the same in every step."""
    try:
        check_cover(placements)
    except PlacementError:
        return False
    return True


def _check_whole(placements: Sequence[Placement], boundary: str) -> None:
    if _is_whole_of(tuple(placements)):
        return
    try:
        check_cover(placements, boundary)
    except PlacementError:
        if {"dp", "edp"}.isdisjoint(placements[0].sharded):
            raise
        raise PlacementError(
            "a data-parallel rank's samples are a part of a larger batch"
        ) from None


def _check_sum(key: EventKey, is_sketched: bool, is_complete: bool) -> None:
    """Raise PlacementError unless the sketches of partial sums make up that of their sum."""
    assert key.placement is not None
    axes = key.placement.partial
    over = f"partial sums over {', '.join(axes)}"
    if not is_complete or not {"dp", "edp"}.isdisjoint(axes):
        # Data-parallel ranks may each have divided by their own number of samples.
        raise PlacementError(over)
    if not is_sketched:
        raise PlacementError(f"{over}, recorded without sketches (sketch: true)")


def _summand(placement: Placement, layout: Layout) -> tuple[int, int]:
    """Which of how many partial sums a rank holds; (0, 1) for what is no partial sum."""
    found = [layout.axis(name) or layout.axis(name, "expert") for name in placement.partial]
    axes = [axis for axis in found if axis is not None]
    place = 0
    for axis in axes:
        place = place * axis.size + axis.index
    return place, prod(axis.size for axis in axes)


def _unplaced(parts: Sequence[Part], layouts: Mapping[int, Layout]) -> Value:
    key = parts[0].key
    values = {part.value for part in parts}
    shapes = {part.key.shape for part in parts}
    if len(parts) == 1 and _is_whole(layouts[parts[0].rank]):
        return parts[0].value
    is_setting = not key.shape or _TENSOR.match(key.dtype) is None  # a number, a word, None
    if is_setting or (key.role in _SAID_BY_EVERY_RANK and len(shapes) == 1):
        if len(values) == len(shapes) == 1:
            return parts[0].value
        raise PlacementError(
            "ranks hold other values, and no placement says how they belong together"
        )
    raise PlacementError("no placement is known (a rule for --place or for enable says it)")


def _is_whole(layout: Layout) -> bool:
    """Whether each rank computes whole tensors, of its own samples."""
    return all(axis.size == 1 for axis in layout.axes if axis.name not in ("dp", "pp", "vpp"))


def _agreed(values: set[Value]) -> Value:
    """The value of replicas. Where they disagree, one that no tensor is likely to have."""
    if len(values) == 1:
        return next(iter(values))
    return _sum([(3 * h + 1, 3 * s + 1) for h, s in values])


def _scaled(value: Value, factor: int) -> Value:
    return (value[0] * factor, value[1] * factor)


def _sum(values: Sequence[Value]) -> Value:
    return sum(h for h, _ in values) % FINGERPRINT_PRIME, sum(s for _, s in values) % (1 << 64)
