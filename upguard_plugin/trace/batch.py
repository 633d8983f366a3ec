"""Events of one rank in one step, as columns.

The recorder makes a batch at the end of each step, the writer stores it, the reader gives it back,
compare works on its columns. Row order is program order on the rank. What repeats every step is
interned: `key[i]` is the index in `keys` of event i's `EventKey`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import EventKey, Fingerprint

NONE = -1  # in integer columns: the event has no such value

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All columns have one row per event; optional columns are None where nothing was recorded."""

    step: int  # optimizer steps since `enable`, from 0
    keys: Sequence[EventKey]  # may be longer than this batch needs: the table of the whole rank
    key: npt.NDArray[np.int32]
    seq: Ints  # program order on the rank, over the whole run; strictly increasing
    microbatch: npt.NDArray[np.int32]  # NONE outside micro-batches
    call: npt.NDArray[np.int32]  # n-th call of the boundary in its step and micro-batch
    h: Words
    s: Words
    iteration: int | None = None  # the framework's own number
    mark: str | None = None  # "skipped" or "rerun": what the framework did with the step
    producer: Ints | None = None  # seq of the event that wrote this storage last, or NONE
    value: Floats | None = None  # of scalars, to be read by people; NaN for tensors
    nonfinite: Ints | None = None  # NONE where not counted
    max_abs: Floats | None = None
    sketch: Floats | None = None  # [events, K]; a row of NaN where none was taken
    group_seq: Ints | None = None  # collectives: n-th one of its group
    peer: npt.NDArray[np.int32] | None = None  # send/recv: the other rank
    tag: npt.NDArray[np.int32] | None = None
    pair_seq: Ints | None = None  # send/recv: n-th one of the pair

    def __len__(self) -> int:
        return len(self.key)

    def key_of(self, row: int) -> EventKey:
        return self.keys[int(self.key[row])]

    def take(self, rows: Ints) -> EventBatch:
        """The events of these rows, in their order."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {
            n: column[rows] for n, column in columns.items() if isinstance(column, np.ndarray)
        }
        return replace(self, **taken)

    def fingerprint(self, row: int) -> Fingerprint:
        """The event's fingerprint, with the logical shape where the placement is known."""
        key = self.key_of(row)
        shape = key.shape if key.placement is None else key.placement.logical_shape
        return Fingerprint(int(self.h[row]), int(self.s[row]), key.dtype, shape)


@dataclass(frozen=True, slots=True)
class StepEntry:
    """What the index of a rank says of one step, without reading its events."""

    step: int
    iteration: int | None
    mark: str | None
    num_events: int
    digest: bytes  # 16 bytes; equal digests mean equal events, see docs/trace-format.md


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank's trace ends."""

    complete: bool  # closed by `Guard.close()`
    reason: str = (
        ""  # why it is incomplete: "disk full", "max_bytes reached", "killed or still running"
    )
    notes: tuple[str, ...] = field(default=())  # what capture could not see, in whole sentences
