"""One step of one rank in both runs: which events pair, and which pairs differ.

In:  two batches of events.
Out: a `Pairing`: rows that pair, rows that are alone, and masks of what differs.

Events pair inside one micro-batch and phase, in program order. What is left over then pairs if it
names the same call of the same boundary (it ran elsewhere), or that call with another operator,
reduce op or group. Anything else stays alone and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.align import Stretch, align
from upguard_plugin.compare.keys import KeyColumns, KeySpace, called
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

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
            and not bool((self.value_differs | self.form_differs).any())
        )

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
    for by_identity in (True, False):
        pairs.append(_pair_left_over(baseline, target, pairs, by_identity))
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
    baseline: Side, target: Side, pairs: list[tuple[Ints, Ints]], by_identity: bool
) -> tuple[Ints, Ints]:
    """Pair what ran elsewhere, or as another operator, if each side has it once."""
    none = np.empty(0, dtype=np.int64)
    paired_b = np.concatenate([none, *(b for b, _ in pairs)])
    paired_t = np.concatenate([none, *(t for _, t in pairs)])
    rows_b = _movable(baseline, _others(paired_b, len(baseline.batch)))
    rows_t = _movable(target, _others(paired_t, len(target.batch)))
    names_b = _names(baseline, rows_b, by_identity)
    names_t = _names(target, rows_t, by_identity)
    once_b = {name: row for name, row in names_b.items() if row is not None}
    found = [(row, names_t[name]) for name, row in once_b.items() if names_t.get(name) is not None]
    return (
        np.array([b for b, _ in found], dtype=np.int64),
        np.array([t for _, t in found], dtype=np.int64),
    )


def _movable(side: Side, rows: Ints) -> Ints:
    # The call numbers of operators shift when one is inserted: they prove nothing here.
    key = side.key[rows]
    fixed = side.columns.is_operator[key] & ~side.columns.is_collective[key]
    return rows[~fixed]


def _names(side: Side, rows: Ints, by_identity: bool) -> dict[tuple[int, int, int], int | None]:
    """Row of each name; None for a name that more than one row has."""
    column = side.columns.identity if by_identity else side.columns.loose
    names: dict[tuple[int, int, int], int | None] = {}
    for row, identity, microbatch, call in zip(
        rows.tolist(),
        column[side.key[rows]].tolist(),
        side.batch.microbatch[rows].tolist(),
        side.batch.call[rows].tolist(),
        strict=True,
    ):
        name = (identity, microbatch, call)
        names[name] = None if name in names else row
    return names
