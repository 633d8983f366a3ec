"""Calls of operators that look alike as a whole are one call, whatever ran between them.

In:  the rows that order and names have paired, event by event.
Out: the same, but that a call which the other run has too, with the same inputs and the same
     results, pairs with it: two calls of one name that changed places are no difference.

Only calls whose inputs were recorded, or that need none to leave zeros: of other results alone
nobody can say whether two operators changed places or their values did. A call that one run makes
more often than the other is left as it is.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from upguard_plugin.compare.keys import ROLE_NUMBER, called
from upguard_plugin.compare.sides import Bools, Ints, Side, Words, rows_without

_ZEROING = frozenset({"aten.zero_", "aten._foreach_zero_"})
# Odd numbers, to tell apart what is added up.
_MIX = [np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9)]
_MOST = 1 << 20  # micro-batches, and calls of one operator in one of them: more than a step has


def pair_calls(baseline: Side, target: Side, rows_b: Ints, rows_t: Ints) -> tuple[Ints, Ints]:
    """Pairs of rows in, pairs of rows out, in the baseline's order."""
    forms_b, forms_t = (
        side.columns.form[side.key[rows]] for side, rows in ((baseline, rows_b), (target, rows_t))
    )
    equal = (baseline.hint()[rows_b] == target.hint()[rows_t]) & (forms_b == forms_t)
    open_b = rows_without(rows_b[equal], len(baseline.batch))
    if not _are_calls(baseline)[open_b].any():
        return rows_b, rows_t
    names: dict[Hashable, int] = {}
    calls = _Calls.of(baseline, names), _Calls.of(target, names)
    partner = np.full(len(baseline.batch), -1, np.int64)
    partner[rows_b] = rows_t
    owner = np.full(len(target.batch), -1, np.int64)
    owner[rows_t] = rows_b
    ours, theirs, of_call = _alike(*calls)
    apart = np.isin(of_call, of_call[partner[ours] != theirs])
    ours, theirs = ours[apart], theirs[apart]
    others_b, others_t = owner[theirs], partner[ours]
    partner[others_b[others_b >= 0]] = -1
    owner[others_t[others_t >= 0]] = -1
    partner[ours], owner[theirs] = theirs, ours
    found = np.flatnonzero(partner >= 0)
    return found, partner[found]


def _are_calls(side: Side) -> Bools:
    """Which events belong to calls of operators; those of collectives are told by their group."""
    are: Bools = (side.columns.is_operator & ~side.columns.is_collective)[side.key]
    return are


@dataclass(frozen=True, slots=True, eq=False)
class _Calls:
    """The calls of operators in a step, each with its inputs; one answer per call."""

    rows: Ints  # of all calls: one call after the other, inside of it by name
    start: Ints  # where its rows begin
    length: Ints
    first: Ints  # its first row in program order
    look: Words  # equal numbers for equal names and values

    @classmethod
    def of(cls, side: Side, names: dict[Hashable, int]) -> _Calls:
        """names: numbers that mean the same on both sides."""
        batch, columns = side.batch, side.columns
        name = np.array(
            [
                names.setdefault((key.boundary, key.phase, called(key)), len(names))
                for key in columns.keys
            ],
            np.int64,
        )
        rows = np.flatnonzero(_are_calls(side))
        key = side.key[rows]
        number = (name[key] * _MOST + batch.microbatch[rows] + 1) * _MOST + batch.call[rows]
        order = np.lexsort((columns.identity[key], number))
        rows, key, number = rows[order], key[order], number[order]
        if not len(rows):
            return cls(rows, rows, rows, rows, rows.astype(np.uint64))
        start = np.flatnonzero(np.concatenate([[True], number[1:] != number[:-1]]))
        looks = _mixed(
            side.hint()[rows],
            columns.form[key],
            columns.identity[key] * _MOST + batch.microbatch[rows] + 1,
        )
        zeroes = np.array([one.operator in _ZEROING for one in columns.keys], np.bool_)[key]
        tells = zeroes | (columns.role[key] == ROLE_NUMBER["input"])
        calls = cls(
            rows,
            start,
            np.diff(np.append(start, len(rows))),
            np.minimum.reduceat(rows, start),
            np.add.reduceat(looks, start),
        )
        return calls.take(np.flatnonzero(np.add.reduceat(tells, start) > 0))

    def take(self, calls: Ints) -> _Calls:
        """These calls, in this order."""
        return _Calls(
            self.rows, self.start[calls], self.length[calls], self.first[calls], self.look[calls]
        )

    def all_rows(self) -> Ints:
        """The rows of one call after the other."""
        ends = np.cumsum(self.length)
        inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(
            ends - self.length, self.length
        )
        rows: Ints = self.rows[np.repeat(self.start, self.length) + inside]
        return rows


def _mixed(values: Words, forms: Ints, names: Ints) -> Words:
    mixed: Words = values * _MIX[0] + forms.astype(np.uint64) * _MIX[1] + names.astype(np.uint64)
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIX[2]
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _alike(baseline: _Calls, target: _Calls) -> tuple[Ints, Ints, Ints]:
    """Rows of calls that both runs make equally often, the n-th with the n-th; of which call."""
    sides = []
    for calls in (baseline, target):
        calls = calls.take(np.lexsort((calls.first, calls.look)))
        sides.append((calls, *np.unique(calls.look, return_counts=True)))
    (ours, looks_b, counts_b), (theirs, looks_t, counts_t) = sides
    _, at_b, at_t = np.intersect1d(looks_b, looks_t, assume_unique=True, return_indices=True)
    common = looks_b[at_b[counts_b[at_b] == counts_t[at_t]]]
    ours = ours.take(np.flatnonzero(np.isin(ours.look, common)))
    theirs = theirs.take(np.flatnonzero(np.isin(theirs.look, common)))
    same = np.flatnonzero(ours.length == theirs.length)
    ours, theirs = ours.take(same), theirs.take(same)
    return ours.all_rows(), theirs.all_rows(), np.repeat(np.arange(len(same)), ours.length)
