"""Events that have no partner at their place: which of them moved, or changed their name.

In:  both sides of a step, and the rows that pair in their micro-batch and phase.
Out: further pairs.

What is left over pairs if it names the same call of the same boundary (it ran elsewhere), or that
call with another operator, reduce op or group, or its argument, by keyword in one run and by
position in the other, or the same operator with the same value. Anything else stays alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.sides import Ints, Side, rows_without

Columns = Sequence[npt.NDArray[Any]]
Name = tuple[int, ...]
Names = Callable[[Side, Ints], tuple[Ints, Columns]]

_NEAR = 4  # pairs that an operator may have moved over


def pair_moved(baseline: Side, target: Side, pairs: list[tuple[Ints, Ints]]) -> None:
    """Add the pairs of what is left over to `pairs`, the surest first."""
    keywords = _by_argument(baseline), _by_argument(target)
    for names in (_by_identity, _by_place, *keywords, _by_value):
        pairs.append(_pair_left_over(baseline, target, pairs, names))
    pairs.append(_pair_near_by(baseline, target, pairs))


def _pair_left_over(
    baseline: Side, target: Side, pairs: list[tuple[Ints, Ints]], names: Names
) -> tuple[Ints, Ints]:
    """Pair what ran elsewhere, or as another operator, if both sides have its name."""
    none = np.empty(0, dtype=np.int64)
    paired_b = np.concatenate([none, *(b for b, _ in pairs)])
    paired_t = np.concatenate([none, *(t for _, t in pairs)])
    rows_b, rows_t = (
        rows_without(paired_b, len(baseline.batch)),
        rows_without(paired_t, len(target.batch)),
    )
    if not len(rows_b) or not len(rows_t):
        return none, none
    names_b, names_t = _rows_of(baseline, rows_b, names), _rows_of(target, rows_t, names)
    found = [
        pair
        for name in names_b.keys() & names_t.keys()
        for pair in _in_order(names_b[name], names_t[name], same_value=names is _by_value)
    ]
    return (
        np.array([b for b, _ in found], dtype=np.int64),
        np.array([t for _, t in found], dtype=np.int64),
    )


def _in_order(
    rows_b: list[int], rows_t: list[int], *, same_value: bool
) -> Iterable[tuple[int, int]]:
    """Rows of one name: one on each side, or of one value, which may stand for each other."""
    if same_value:
        return _nearest(rows_b, rows_t)
    return zip(rows_b, rows_t, strict=True) if len(rows_b) == len(rows_t) == 1 else ()


def _nearest(rows_b: list[int], rows_t: list[int]) -> Iterable[tuple[int, int]]:
    """As many pairs as there can be, in order; of the side that has more, those near by."""
    if len(rows_b) > len(rows_t):
        return [(b, t) for t, b in _nearest(rows_t, rows_b)]
    found, start = [], 0
    for place, row in enumerate(rows_b):
        stop = len(rows_t) - (len(rows_b) - place) + 1  # leave one for each that follows
        nearest = bisect_left(rows_t, row, start, stop - 1)
        if nearest > start and row - rows_t[nearest - 1] < rows_t[nearest] - row:
            nearest -= 1
        found.append((row, rows_t[nearest]))
        start = nearest + 1
    return found


def _pair_near_by(
    baseline: Side, target: Side, pairs: list[tuple[Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Pair operators that moved by a few events and have another value.

    Two that are left over pair if, near by, each is the only one of its name that could.
    """
    paired_b = np.concatenate([b for b, _ in pairs])
    order = np.argsort(paired_b, kind="stable")
    paired_b, paired_t = paired_b[order], np.concatenate([t for _, t in pairs])[order]
    left_b = _unmovable(baseline, rows_without(paired_b, len(baseline.batch)))
    left_t = _unmovable(target, rows_without(paired_t, len(target.batch)))
    if not len(left_b) or not len(left_t):
        return left_b[:0], left_t[:0]
    by_target = np.argsort(paired_t, kind="stable")  # places in the baseline's order
    before = np.searchsorted(paired_t[by_target], left_t) - 1
    place_t = np.where(before < 0, 0, by_target[before] + 1)
    place_b = np.searchsorted(paired_b, left_b)
    names = np.concatenate([_names_in(baseline, left_b), _names_in(target, left_t)])
    number = np.unique(names, axis=0, return_inverse=True)[1].reshape(-1)
    spots = number * (len(paired_b) + 4 * _NEAR) + np.concatenate([place_b, place_t])
    spots_b, spots_t = spots[: len(left_b)], spots[len(left_b) :]
    from_b, num_b = _near_spots(spots_b, spots_t)
    _, num_t = _near_spots(spots_t, spots_b)
    found_b = np.flatnonzero(num_b == 1)
    found_t = np.argsort(spots_t, kind="stable")[from_b[found_b]]
    mutual = num_t[found_t] == 1
    return left_b[found_b[mutual]], left_t[found_t[mutual]]


def _near_spots(spots: Ints, others: Ints) -> tuple[Ints, Ints]:
    """Per spot, where in the sorted others those near by begin, and how many they are."""
    ordered = np.sort(others)
    first = np.searchsorted(ordered, spots - _NEAR)
    return first, np.searchsorted(ordered, spots + _NEAR, side="right") - first


def _by_identity(side: Side, rows: Ints) -> tuple[Ints, Columns]:
    """Rows that are named by the call of their boundary, and the names."""
    rows = _movable(side, rows)
    return rows, (side.columns.identity[side.key[rows]], side.batch.call[rows])


def _by_place(side: Side, rows: Ints) -> tuple[Ints, Columns]:
    """The same without operator, op and group."""
    rows = _movable(side, rows)
    return rows, (side.columns.loose[side.key[rows]], side.batch.call[rows])


def _by_argument(keyword: Side) -> Names:
    """Arguments that one side passes by keyword and the other by position, without their slots."""

    def names(side: Side, rows: Ints) -> tuple[Ints, Columns]:
        rows = _movable(side, rows)
        key = side.key[rows]
        of_side = side.columns.is_keyword[key] == (side is keyword)
        rows = rows[of_side & (side.columns.argument[key] > 0)]
        return rows, (side.columns.argument[side.key[rows]], side.batch.call[rows])

    return names


def _by_value(side: Side, rows: Ints) -> tuple[Ints, Columns]:
    """The other rows, named by their operator and fingerprint: what looks the same and moved."""
    rows = _unmovable(side, rows)
    return rows, (side.columns.identity[side.key[rows]], side.batch.h[rows], side.batch.s[rows])


def _unmovable(side: Side, rows: Ints) -> Ints:
    return np.setdiff1d(rows, _movable(side, rows), assume_unique=True)


def _names_in(side: Side, rows: Ints) -> Ints:
    """Identity and micro-batch of each row: [rows, 2]."""
    columns = (side.columns.identity[side.key[rows]], side.batch.microbatch[rows])
    return np.stack([column.astype(np.int64) for column in columns], axis=1)


def _movable(side: Side, rows: Ints) -> Ints:
    # The call numbers of operators shift when one is inserted: they prove nothing here.
    key = side.key[rows]
    fixed = side.columns.is_operator[key] & ~side.columns.is_collective[key]
    return rows[~fixed]


def _rows_of(side: Side, rows: Ints, names: Names) -> dict[Name, list[int]]:
    """The rows of each name, in order."""
    found: dict[Name, list[int]] = {}
    rows, listed = names(side, rows)
    columns = [column.tolist() for column in (side.batch.microbatch[rows], *listed)]
    for row, *name in zip(rows.tolist(), *columns, strict=True):
        found.setdefault(tuple(name), []).append(row)
    return found
