"""How the parts that ranks hold of one tensor make up the whole.

In:  the holdings of one name.
Out: an `Assembly`: which holdings are replicas of one piece, which pieces add up to the logical
     tensor, its shape; and why they make up none, which may depend on the values.

Parts are added up by their placements. Replicas must agree; where they do not, there is no logical
tensor, and it gets a fingerprint that no tensor has. Partial sums have a sketch, which adds up as
they do, and a fingerprint that only equal partial sums share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from upguard_plugin.compare.layouts.holdings import Holding
from upguard_plugin.errors import PlacementError
from upguard_plugin.placement import parse_placement
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.records import EventKey, Piece, Placement

_SAID_BY_EVERY_RANK = ("scalar", "data", "sample")  # not split unless a placement says so
_TENSOR = re.compile(r"b?float|complex|q?u?int|bool|bits")  # how the dtypes of tensors begin
_SEVERAL = "the ranks' parts have several dtypes, or a placement is missing"
_OTHER_VALUES = "ranks hold other values, and no placement says how they belong together"
_UNKNOWN = "no placement is known"


@dataclass(frozen=True, slots=True)
class Assembly:
    """How holdings make up a tensor."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]  # their names in the placement
    pieces: Sequence[tuple[int, Sequence[int]]]  # summand, and the holdings that are replicas of it
    num_summands: int = 1  # more: it was not added up yet, each rank holds a partial sum
    reason: str | None = None  # why they make up none
    unsketched: str | None = None  # why they make up none where no sketches were recorded
    unequal: str | None = None  # why they make up none where holders disagree


def assembly_of(found: Sequence[int], holdings: Sequence[Holding]) -> Assembly:
    """found: which of the holdings have the name, in order of their ranks."""
    parts = [holdings[number] for number in found]
    key = parts[0].key
    together = [(0, found)]
    if len({(part.key.dtype, part.key.placement is None) for part in parts}) > 1:
        return Assembly(key.shape, (), together, reason=_SEVERAL)
    if key.placement is None:
        reason, unequal = _unplaced(parts)
        return Assembly(key.shape, (), together, reason=reason, unequal=unequal)
    # By summand, which is 0 but for partial sums, and by the pieces that a rank holds of it.
    held: dict[tuple[int, tuple[Piece, ...]], list[int]] = {}
    for number, part in zip(found, parts, strict=True):
        held.setdefault((part.summand, _placement(part).pieces), []).append(number)
    num_summands = parts[-1].num_summands
    reason = unsketched = None
    if num_summands > 1:
        is_complete = len({summand for summand, _ in held}) == num_summands
        reason, unsketched = _why_no_sum(key, is_complete)
    return Assembly(
        key.placement.logical_shape,
        _dims(key.placement.spec),
        [(summand, replicas) for (summand, _), replicas in held.items()],
        num_summands,
        reason or _why_no_whole(held, holdings, key.boundary),
        unsketched,
    )


@lru_cache(maxsize=4096)
def _dims(spec: str) -> tuple[str, ...]:
    """The names of the dims of what a rank holds, in order; fused ones are one."""
    if not spec:
        return ()
    terms = parse_placement(spec).views[0].terms
    return tuple("*" if term is None else " ".join(dim.name for dim in term) for term in terms)


def _placement(part: Holding) -> Placement:
    assert part.key.placement is not None
    return part.key.placement


def _why_no_whole(
    held: dict[tuple[int, tuple[Piece, ...]], list[int]], holdings: Sequence[Holding], boundary: str
) -> str | None:
    try:
        for summand in {summand for summand, _ in held}:
            mine = [_placement(holdings[own[0]]) for (s, _), own in held.items() if s == summand]
            _check_whole(mine, boundary)
    except PlacementError as error:
        return error.sentence
    return None


@lru_cache(maxsize=1 << 16)
def _is_whole_of(placements: tuple[Placement, ...]) -> bool:
    """Whether the parts make up the whole; many tensors have the same placements."""
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


def _why_no_sum(key: EventKey, is_complete: bool) -> tuple[str | None, str | None]:
    """Why partial sums do not make up their sum, and why they do not without sketches."""
    assert key.placement is not None
    axes = key.placement.partial
    over = f"partial sums over {', '.join(axes)}"
    if not is_complete or not {"dp", "edp"}.isdisjoint(axes):
        # Data-parallel ranks may each have divided by their own number of samples.
        return over, None
    return None, f"{over}, recorded without sketches (sketch: true)"


def _unplaced(parts: Sequence[Holding]) -> tuple[str | None, str | None]:
    """Why parts without a placement make up none, and why they do not if they are unequal."""
    key = parts[0].key
    if sum(part.num_events for part in parts) == 1 and parts[0].is_whole:
        return None, None
    is_setting = not key.shape or _TENSOR.match(key.dtype) is None  # a number, a word, None
    one_shape = len({part.key.shape for part in parts}) == 1
    if (key.role in _SAID_BY_EVERY_RANK or is_setting) and one_shape:
        return None, _OTHER_VALUES
    return _UNKNOWN, None
