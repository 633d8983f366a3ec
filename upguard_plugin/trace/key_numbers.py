"""Numbers for distinct event keys: from the recorder's key table to the one in the file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch


class KeyNumbers:
    """Numbers distinct keys in the order in which they first occur."""

    def __init__(self) -> None:
        self._number: dict[EventKey, int] = {}
        self._table: Sequence[EventKey] = ()  # the recorder's table, seen last
        self._number_of_row = np.empty(0, np.int32)  # -1: row not seen yet

    def of(self, batch: EventBatch) -> npt.NDArray[np.int32]:
        """The batch's `key` column in our numbers: int32 [events]."""
        if batch.keys is not self._table:
            self._table = batch.keys
            self._number_of_row = np.empty(0, np.int32)
        num_new = len(batch.keys) - len(self._number_of_row)
        if num_new:
            unseen = np.full(num_new, -1, np.int32)
            self._number_of_row = np.concatenate([self._number_of_row, unseen])
        numbers = self._number_of_row[batch.key]
        if (numbers < 0).any():
            rows, first = np.unique(batch.key[numbers < 0], return_index=True)
            for row in rows[np.argsort(first)]:
                key = batch.keys[row]
                self._number_of_row[row] = self._number.setdefault(key, len(self._number))
            numbers = self._number_of_row[batch.key]
        return numbers

    def since(self, count: int) -> list[EventKey]:
        """All keys but the first `count`."""
        return list(itertools.islice(self._number, count, None))
