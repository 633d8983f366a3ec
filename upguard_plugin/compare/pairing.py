"""One step of one rank in both runs: which events pair, and which pairs differ.

In:  two batches of events.
Out: a `Pairing`: rows that pair, rows that are alone, and masks of what differs.

Events pair inside one micro-batch and phase, in program order. What is left over then pairs if it
names the same call of the same boundary (it ran elsewhere), or that call with another operator,
reduce op or group, or its argument, by keyword in one run and by position in the other, or the same
operator with the same value. Anything else stays alone and is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.align import Stretch, align
from upguard_plugin.compare.keys import KeyColumns, KeySpace, called
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

Columns = Sequence[npt.NDArray[Any]]
Name = tuple[int, ...]
Names = Callable[["Side", Ints], tuple[Ints, Columns]]

_NEAR = 4  # pairs that an operator may have moved over
_CALLS = 1 << 24  # more calls of one boundary in one micro-batch than there are


@dataclass(frozen=True, slots=True)
class Side:
    """The events of one run in the step, with the columns of their keys."""

    batch: EventBatch
    columns: KeyColumns

    @property
    def key(self) -> Ints:
        return self.batch.key.astype(np.int64)

    def identity(self) -> Ints:
        """What may pair. An operator's call number is left out: an extra call shifts the others."""
        call = np.where(self.columns.is_operator[self.key], 0, self.batch.call.astype(np.int64) + 1)
        return self.columns.identity[self.key] * _CALLS + call

    def hint(self) -> Words:
        mixed: Words = self.batch.h + self.batch.s * np.uint64(0x9E3779B97F4A7C15)
        return mixed


@dataclass(frozen=True, slots=True)
class Pairing:
    """Rows `baseline_rows[i]` and `target_rows[i]` are one event; in the baseline's order."""

    baseline: Side
    target: Side
    baseline_rows: Ints
    target_rows: Ints
    baseline_alone: Ints
    target_alone: Ints
    value_differs: Bools  # other fingerprints of tensors of one dtype and shape
    form_differs: Bools  # other dtype or shape, or a sum that is complete in one run only
    comparable: Bools  # False: hashed at other offsets, so other fingerprints say nothing
    rounding: Bools | None = None  # across layouts: values that differ by rounding, set apart

    @property
    def differs(self) -> Bools:
        return self.comparable & (self.value_differs | self.form_differs)

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same events in the same order, bit by bit."""
        key_b, key_t = self.baseline.key, self.target.key
        return (
            len(key_b) == len(key_t) == len(self.baseline_rows)
            and np.array_equal(self.baseline_rows, self.target_rows)
            and np.array_equal(
                self.baseline.columns.identity[key_b], self.target.columns.identity[key_t]
            )
            and not bool(
                (self.slot_differs | self.value_differs | self.form_differs | self.rounds).any()
            )
        )

    @property
    def rounds(self) -> Bools:
        """Which pairs are unequal by rounding; they are not among those that differ."""
        none = np.zeros(len(self.baseline_rows), dtype=np.bool_)
        return none if self.rounding is None else self.rounding

    @property
    def slot_differs(self) -> Bools:
        """Which pairs are the same input, output or gradient of a call in another slot."""
        slots = [
            side.columns.slot[side.key[rows]]
            for side, rows in (
                (self.baseline, self.baseline_rows),
                (self.target, self.target_rows),
            )
        ]
        differs: Bools = slots[0] != slots[1]
        return differs

    def baseline_key(self, pair: int) -> EventKey:
        return self.baseline.batch.key_of(int(self.baseline_rows[pair]))

    def target_key(self, pair: int) -> EventKey:
        return self.target.batch.key_of(int(self.target_rows[pair]))

    def of_call(self, baseline_row: int, role: str, *, phase: str | None = None) -> Ints:
        """Pairs of that role in the same call of the same module or operator, and its phase."""
        batch, columns = self.baseline.batch, self.baseline.columns
        key = batch.key_of(baseline_row)
        name = (key.boundary, phase or key.phase, role, called(key))
        wanted = [
            number
            for number, other in enumerate(columns.keys)
            if (other.boundary, other.phase, other.role, called(other)) == name
        ]
        rows = self.baseline_rows
        return np.flatnonzero(
            np.isin(batch.key[rows], wanted)
            & (batch.call[rows] == batch.call[baseline_row])
            & (batch.microbatch[rows] == batch.microbatch[baseline_row])
        )


def pair_step(baseline: EventBatch, target: EventBatch, space: KeySpace) -> Pairing:
    """Pair the events of one step."""
    sides = (Side(baseline, space.columns(baseline.keys)), Side(target, space.columns(target.keys)))
    rows_b, rows_t = _pair_rows(*sides)
    forms = (
        sides[0].columns.form[sides[0].key[rows_b]] != sides[1].columns.form[sides[1].key[rows_t]]
    )
    partial = [
        side.columns.partial[side.key[rows]]
        for side, rows in zip(sides, (rows_b, rows_t), strict=True)
    ]
    forms |= (partial[0] != partial[1]) & (partial[0] > 0) & (partial[1] > 0)
    placed = (
        sides[0].columns.placement[sides[0].key[rows_b]]
        == sides[1].columns.placement[sides[1].key[rows_t]]
    )
    values = (baseline.h[rows_b] != target.h[rows_t]) | (baseline.s[rows_b] != target.s[rows_t])
    return Pairing(
        *sides,
        rows_b,
        rows_t,
        _others(rows_b, len(baseline)),
        _others(rows_t, len(target)),
        values & ~forms,
        forms,
        placed | forms | ~values,
    )


def _others(rows: Ints, length: int) -> Ints:
    alone = np.ones(length, dtype=np.bool_)
    alone[rows] = False
    return np.flatnonzero(alone)


def _pair_rows(baseline: Side, target: Side) -> tuple[Ints, Ints]:
    identity_b, identity_t = baseline.identity(), target.identity()
    if (
        np.array_equal(identity_b, identity_t)
        and np.array_equal(baseline.batch.microbatch, target.batch.microbatch)
        and np.array_equal(baseline.batch.call, target.batch.call)
    ):
        rows = np.arange(len(identity_b), dtype=np.int64)
        return rows, rows
    pairs: list[tuple[Ints, Ints]] = []
    for in_b, in_t in _segments(baseline, target):
        found_b, found_t = align(
            Stretch(identity_b[in_b], baseline.hint()[in_b]),
            Stretch(identity_t[in_t], target.hint()[in_t]),
        )
        pairs.append((in_b[found_b], in_t[found_t]))
    keywords = _by_argument(baseline), _by_argument(target)
    for names in (_by_identity, _by_place, *keywords, _by_value):
        pairs.append(_pair_left_over(baseline, target, pairs, names))
    pairs.append(_pair_near_by(baseline, target, pairs))
    rows_b = np.concatenate([b for b, _ in pairs])
    rows_t = np.concatenate([t for _, t in pairs])
    order = np.argsort(rows_b, kind="stable")
    return rows_b[order], rows_t[order]


def _segments(baseline: Side, target: Side) -> Iterator[tuple[Ints, Ints]]:
    """Rows of each micro-batch and phase that both sides have."""
    labels = [
        (side.batch.microbatch.astype(np.int64) + 1) * 64 + side.columns.phase[side.key]
        for side in (baseline, target)
    ]
    for label in np.intersect1d(labels[0], labels[1]):
        yield np.flatnonzero(labels[0] == label), np.flatnonzero(labels[1] == label)


def _pair_left_over(
    baseline: Side, target: Side, pairs: list[tuple[Ints, Ints]], names: Names
) -> tuple[Ints, Ints]:
    """Pair what ran elsewhere, or as another operator, if both sides have its name."""
    none = np.empty(0, dtype=np.int64)
    paired_b = np.concatenate([none, *(b for b, _ in pairs)])
    paired_t = np.concatenate([none, *(t for _, t in pairs)])
    rows_b, rows_t = _others(paired_b, len(baseline.batch)), _others(paired_t, len(target.batch))
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
    left_b = _unmovable(baseline, _others(paired_b, len(baseline.batch)))
    left_t = _unmovable(target, _others(paired_t, len(target.batch)))
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
