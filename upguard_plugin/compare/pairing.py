"""One step of one rank in both runs: which events pair, and which pairs differ.

In:  two batches of events.
Out: a `Pairing`: rows that pair, rows that are alone, and masks of what differs.

Events pair inside one micro-batch and phase, in program order. What is left over then pairs if it
names the same call of the same boundary (it ran elsewhere), or that call with another operator,
reduce op or group, or the same operator with the same value. Anything else stays alone and is
counted.
"""

from __future__ import annotations

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
    form_differs: Bools  # other dtype or shape
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
            and not bool((self.value_differs | self.form_differs | self.rounds).any())
        )

    @property
    def rounds(self) -> Bools:
        """Which pairs are unequal by rounding; they are not among those that differ."""
        none = np.zeros(len(self.baseline_rows), dtype=np.bool_)
        return none if self.rounding is None else self.rounding

    def baseline_key(self, pair: int) -> EventKey:
        return self.baseline.batch.key_of(int(self.baseline_rows[pair]))

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
    for names in (_by_identity, _by_place, _by_value):
        pairs.append(_pair_left_over(baseline, target, pairs, names))
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
    """Rows of one name: one on each side, or as many of one value, which are alike."""
    if len(rows_b) == len(rows_t) and (len(rows_b) == 1 or same_value):
        return zip(rows_b, rows_t, strict=True)
    return ()


def _by_identity(side: Side, rows: Ints) -> tuple[Ints, Columns]:
    """Rows that are named by the call of their boundary, and the names."""
    rows = _movable(side, rows)
    return rows, (side.columns.identity[side.key[rows]], side.batch.call[rows])


def _by_place(side: Side, rows: Ints) -> tuple[Ints, Columns]:
    """The same without operator, op and group."""
    rows = _movable(side, rows)
    return rows, (side.columns.loose[side.key[rows]], side.batch.call[rows])


def _by_value(side: Side, rows: Ints) -> tuple[Ints, Columns]:
    """The other rows, named by their operator and fingerprint: what looks the same and moved."""
    rows = np.setdiff1d(rows, _movable(side, rows), assume_unique=True)
    return rows, (side.columns.identity[side.key[rows]], side.batch.h[rows], side.batch.s[rows])


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
