"""One step of one rank in both runs: which events pair, and which pairs differ.

In:  two batches of events.
Out: a `Pairing`: rows that pair, rows that are alone, and masks of what differs.

Events pair inside one micro-batch and phase, in program order; of what is left over then, those
that moved. Anything else stays alone and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from upguard_plugin.compare.align import Stretch, align
from upguard_plugin.compare.keys import KeySpace, called
from upguard_plugin.compare.moved import pair_moved
from upguard_plugin.compare.sides import Bools, Ints, Side, rows_without
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch


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
        rows_without(rows_b, len(baseline)),
        rows_without(rows_t, len(target)),
        values & ~forms,
        forms,
        placed | forms | ~values,
    )


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
    pair_moved(baseline, target, pairs)
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
