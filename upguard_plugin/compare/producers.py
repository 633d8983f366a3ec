"""Who made a value in one run's step, and whether the other run has that value.

In:  one side of a `Pairing`, at level `op`.
Out: `Producers`: per event, the operator call that made its value; per call, what it takes.

A value is made where its bits first appear as a result. Views are no events: for them the trace
keeps which event wrote their memory last. Zeros are everywhere, so only that tells who made them.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import ROLE_NUMBER, called
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.sides import Side

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

Name = tuple[str, str, str | None]  # boundary, phase and operator
# Where a value comes from: both runs have it; only this one has, from outside of its operators or
# made by one without a partner; or it cannot be said.
Origin = Literal["both", "own", "made", "unknown"]

_WRAPPERS = ("autograd.", "triton.")


class Producers:
    """One run's events in the step. `meet` must be called before the other run is asked about."""

    def __init__(self, pairing: Pairing, number: int, forms: dict[Hashable, int]) -> None:
        """number: 0 for the baseline, 1 for the target. forms: shared by both, to number them."""
        self.side: Side = (pairing.baseline, pairing.target)[number]
        columns, key = self.side.columns, self.side.key
        operator = columns.is_operator[key] & ~columns.is_collective[key]
        self.is_input: Bools = operator & (columns.role[key] == ROLE_NUMBER["input"])
        self.is_result: Bools = operator & (columns.role[key] == ROLE_NUMBER["output"])
        rows = (pairing.baseline_rows, pairing.target_rows)
        self.partner = np.full(len(key), -1, np.int64)
        self.partner[rows[number]] = rows[1 - number]
        self._differs = np.zeros(len(key), np.bool_)
        self._differs[rows[number]] = pairing.differs
        self._alone = np.zeros(len(key), np.bool_)
        self._alone[(pairing.baseline_alone, pairing.target_alone)[number]] = True
        self._forms = forms
        self._other, self._reached = self, 0

    def meet(self, other: Producers, reached: int) -> None:
        """reached: the event of this run at which the runs part."""
        self._other, self._reached = other, reached

    def name(self, row: int) -> Name:
        key = self.side.batch.key_of(row)
        return key.boundary, key.phase, called(key)

    def inputs_of(self, row: int) -> list[int]:
        """The inputs of the call that an operator's event belongs to, in program order."""
        rows: list[int] = np.flatnonzero(self._of_call(row) & self.is_input).tolist()
        return rows

    def first_result_of(self, row: int) -> int:
        """The first result of the call that an operator's event belongs to: it names the call."""
        return int((self._of_call(row) & self.is_result).argmax())

    def origin_of(self, row: int) -> tuple[Origin, int | None]:
        """Where the value of an event comes from, and the result that it is or is a view of."""
        made = self._made_by(row)
        if self.is_shared(row):
            return "both", made
        if made is None:
            return "own", None
        if self._alone[made] or self._is_overtaken(made):
            if self.is_shared(made):
                return "both", made
            return ("made" if self.is_result[made] else "unknown"), made
        if self.partner[made] < 0 or self._differs[made]:
            return "unknown", made
        if self.bits[row] == self.bits[made]:
            return "both", made
        # Other bits than its writer left: a view of them, or somebody has overwritten them.
        ours, theirs = self.side.batch.key_of(row), self.side.batch.key_of(made)
        is_view = ours.shape != theirs.shape and prod(ours.shape) <= prod(theirs.shape)
        return ("both" if is_view else "unknown"), made

    def has_moved(self, row: int) -> bool:
        """Whether the other run has this call too, but not before the parting."""
        ours, theirs = self._num_alone(row), self._other._num_alone(row, self)
        return self._is_overtaken(row) or 0 < ours <= theirs

    def is_equal_to(self, row: int, other_row: int) -> bool:
        """Whether an event of this run and one of the other have the same value."""
        if self.partner[row] == other_row:
            return not self._differs[row]
        return bool(self.bits[row] == self._other.bits[other_row])

    def is_shared(self, row: int) -> bool:
        """Whether the other run has this value anywhere in the step."""
        return int(self.bits[row]) in self._other._all_bits

    @cached_property
    def bits(self) -> Words:
        """Equal numbers for equal bits of one dtype and number of elements; both runs' numbers."""
        forms = [(key.dtype, prod(key.shape)) for key in self.side.columns.keys]
        numbers = [self._forms.setdefault(form, len(self._forms)) for form in forms]
        mixed: Words = np.array(numbers, np.uint64)[self.side.key] * np.uint64(0xD1B54A32D192ED03)
        return mixed + self.side.hint()

    @cached_property
    def _all_bits(self) -> frozenset[int]:
        batch = self.side.batch
        return frozenset(self.bits[(batch.h != 0) | (batch.s != 0)].tolist())

    @cached_property
    def _names(self) -> dict[Name, list[int]]:
        """Numbers of the keys that belong to each operator in its boundary and phase."""
        found: dict[Name, list[int]] = {}
        for number, key in enumerate(self.side.columns.keys):
            if self.side.columns.is_operator[number]:
                found.setdefault((key.boundary, key.phase, called(key)), []).append(number)
        return found

    def _of_call(self, row: int) -> Bools:
        batch = self.side.batch
        mine: Bools = np.isin(batch.key, self._names.get(self.name(row), []))
        mine &= (batch.call == batch.call[row]) & (batch.microbatch == batch.microbatch[row])
        return mine

    def _made_by(self, row: int) -> int | None:
        """The result that an event's value is or is a view of."""
        batch = self.side.batch
        if batch.producer is None or batch.producer[row] < 0:
            return self._last_result(row)
        written = int(np.searchsorted(batch.seq, batch.producer[row]))
        if written >= row or batch.seq[written] != batch.producer[row]:
            return self._last_result(row)  # it was written in an earlier step
        # What a module, a function or a kernel hands on, an operator inside of it may have made.
        is_wrapper = str(self.side.batch.key_of(written).operator).startswith(_WRAPPERS)
        hands_on = not self.is_result[written] or (is_wrapper and self._alone[written])
        inner = self._last_result(written) if hands_on else None
        return written if inner is None else inner

    def _last_result(self, row: int) -> int | None:
        """The last result before an event that has its bits."""
        batch = self.side.batch
        if batch.h[row] == 0 and batch.s[row] == 0:
            return None
        found = np.flatnonzero(self.is_result[:row] & (self.bits[:row] == self.bits[row]))
        return int(found[-1]) if len(found) else None

    def _num_alone(self, row: int, owner: Producers | None = None) -> int:
        """Calls without a partner of the operator that an event belongs to, in its micro-batch."""
        owner, batch = owner or self, self.side.batch
        alone = self._alone & np.isin(batch.key, self._names.get(owner.name(row), []))
        alone &= batch.microbatch == owner.side.batch.microbatch[row]
        return len(np.unique(batch.call[alone & self.is_result]))

    def _is_overtaken(self, row: int) -> bool:
        """Whether the other run makes it only behind the parting, and otherwise."""
        return bool(self._differs[row]) and int(self.partner[row]) > self._other._reached
