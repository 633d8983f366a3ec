"""One run's events of a step, as arrays that can be matched with those of another run.

In:  a batch, and the columns of its keys.
Out: what may pair (`identity`), and what looks the same (`hint`), by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import KeyColumns
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


def rows_without(rows: Ints, length: int) -> Ints:
    """All rows of `length` but these, in order."""
    alone = np.ones(length, dtype=np.bool_)
    alone[rows] = False
    return np.flatnonzero(alone)
