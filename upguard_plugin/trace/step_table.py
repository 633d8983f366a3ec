"""The steps of one rank as columns: what its index says of them, without reading their events.

A table is a sequence of `StepEntry`s too, each made when it is asked for: a rank has thousands of
steps, a run ten thousand ranks, and most steps are only counted and compared by digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from upguard_plugin.trace.batch import StepEntry

NO_ITERATION = -(1 << 63)
MARKS: tuple[str | None, ...] = (None, "skipped", "rerun")

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class StepTable(Sequence[StepEntry]):
    """One row per step, in order. Columns are read-only views where the index is one array."""

    step: Ints  # increasing
    iteration: Ints  # the framework's own number, or NO_ITERATION
    num_events: Ints
    digest: Words  # [steps, 2]: 16 bytes each
    mark: npt.NDArray[np.uint32]  # place in MARKS

    @classmethod
    def of(cls, entries: Iterable[StepEntry]) -> StepTable:
        """The table of these entries; itself where it is one already."""
        if isinstance(entries, StepTable):
            return entries
        listed = list(entries)
        digests = b"".join(entry.digest for entry in listed)
        return cls(
            np.array([entry.step for entry in listed], np.int64),
            np.array([_number(entry.iteration) for entry in listed], np.int64),
            np.array([entry.num_events for entry in listed], np.int64),
            np.frombuffer(digests, "<u8").reshape(-1, 2),
            np.array([MARKS.index(entry.mark) for entry in listed], np.uint32),
        )

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, place: int) -> StepEntry: ...
    @overload
    def __getitem__(self, place: slice) -> StepTable: ...
    def __getitem__(self, place: int | slice) -> StepEntry | StepTable:
        if isinstance(place, slice):
            return StepTable(
                self.step[place],
                self.iteration[place],
                self.num_events[place],
                self.digest[place],
                self.mark[place],
            )
        iteration = int(self.iteration[place])
        return StepEntry(
            int(self.step[place]),
            None if iteration == NO_ITERATION else iteration,
            MARKS[int(self.mark[place])],
            int(self.num_events[place]),
            self.digest[place].tobytes(),
        )

    def row_of(self, step: int) -> int | None:
        """Where the step is, or None where it is not."""
        row = int(np.searchsorted(self.step, step))
        return row if row < len(self.step) and self.step[row] == step else None


def _number(iteration: int | None) -> int:
    return NO_ITERATION if iteration is None else iteration
