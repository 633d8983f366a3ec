"""The rows of a rank: what is known of each event besides its fingerprint.

In:  events in program order, each with the slot its fingerprint has in the queue.
Out: one `EventBatch` per step. What an event *is* (its `EventKey`) is interned: a row is numbers.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from upguard_plugin.capture.position import Position
from upguard_plugin.fingerprint.queue import Hashes
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import NONE, EventBatch

_FIELDS = ("key", "microbatch", "call", "producer", "slot")
_NUM_FIELDS = len(_FIELDS)
_pack = struct.Struct(f"{_NUM_FIELDS}q").pack  # much cheaper than to extend by a tuple


@dataclass(frozen=True, slots=True)
class Wire:
    """Where an event stands in the order between ranks (collectives and send/recv)."""

    group_seq: int = NONE
    peer: int = NONE
    tag: int = NONE
    pair_seq: int = NONE


class Rows:
    """Rows of the current step, and the keys of all steps. Not thread-safe."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}
        self._keys: list[EventKey] = []
        self._rows = array("q")
        self._wires: list[tuple[int, Wire]] = []
        self._values: list[tuple[int, float]] = []
        self.first_seq = 0  # of the current step

    def key_of(self, parts: tuple[Any, ...]) -> int:
        """The number of a key; its parts are the fields of `EventKey`, dtype and shape torch's."""
        # Placements, groups and sources are slow to hash for every event; the key table keeps each
        # of them alive, so its id stays its own.
        identity = (*parts[:8], id(parts[8]), id(parts[9]), parts[10], id(parts[11]), *parts[12:])
        key = self._ids.get(identity)
        if key is None:
            boundary, phase, role, slot, dtype, shape, *rest = parts
            dtype = str(dtype).removeprefix("torch.")
            key = self._ids[identity] = len(self._keys)
            self._keys.append(EventKey(boundary, phase, role, slot, dtype, tuple(shape), *rest))
        return key

    def boundary_of(self, key: int) -> str:
        return self._keys[key].boundary

    def slot_of(self, seq: int) -> int:
        """The queue's slot of an event of the current step."""
        return self._rows[(seq - self.first_seq + 1) * _NUM_FIELDS - 1]

    def add(self, key: int, microbatch: int, call: int, producer: int, slot: int) -> int:
        """Add an event; returns its seq."""
        rows = self._rows
        rows.frombytes(_pack(key, microbatch, call, producer, slot))
        return self.first_seq + len(rows) // _NUM_FIELDS - 1

    def set_wire(self, seq: int, wire: Wire) -> None:
        self._wires.append((seq - self.first_seq, wire))

    def set_value(self, seq: int, value: float) -> None:
        self._values.append((seq - self.first_seq, value))

    def take(self, hashes: Hashes, position: Position, mark: str | None) -> EventBatch | None:
        """All events of the step as a batch, None if there are none; the next step begins empty.

        hashes: by slot.
        """
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, _NUM_FIELDS)
        wires, values, first_seq, num = self._wires, self._values, self.first_seq, len(rows)
        self._rows, self._wires, self._values = array("q"), [], []
        self.first_seq += num
        if not num:
            return None
        columns = {name: rows[:, i] for i, name in enumerate(_FIELDS)}
        hashes = _by_row(hashes, columns["slot"])
        return EventBatch(
            step=position.step,
            iteration=position.iteration,
            mark=mark,
            keys=self._keys,
            key=columns["key"].astype(np.int32),
            seq=np.arange(first_seq, first_seq + num, dtype=np.int64),
            microbatch=columns["microbatch"].astype(np.int32),
            call=columns["call"].astype(np.int32),
            h=hashes.h,
            s=hashes.s,
            producer=columns["producer"].copy() if (columns["producer"] != NONE).any() else None,
            value=_sparse(num, np.nan, np.float64, values),
            nonfinite=hashes.nonfinite,
            max_abs=hashes.max_abs,
            sketch=hashes.sketch,
            group_seq=_sparse(num, NONE, np.int64, ((r, w.group_seq) for r, w in wires)),
            peer=_sparse(num, NONE, np.int32, ((r, w.peer) for r, w in wires)),
            tag=_sparse(num, NONE, np.int32, ((r, w.tag) for r, w in wires)),
            pair_seq=_sparse(num, NONE, np.int64, ((r, w.pair_seq) for r, w in wires)),
        )


def _by_row(hashes: Hashes, slots: npt.NDArray[np.int64]) -> Hashes:
    """One entry per event: events may share a slot."""
    if np.array_equal(slots, np.arange(len(hashes))):
        return hashes  # every event has its own slot, in order
    return Hashes(
        hashes.h[slots],
        hashes.s[slots],
        None if hashes.nonfinite is None else hashes.nonfinite[slots],
        None if hashes.max_abs is None else hashes.max_abs[slots],
        None if hashes.sketch is None else hashes.sketch[slots],
    )


def _sparse(
    num: int, default: float, dtype: type, entries: Iterable[tuple[int, float]]
) -> npt.NDArray[Any] | None:
    """A column with a value in the given rows only; None if no row has one."""
    rows = [(row, value) for row, value in entries if value != default or value != value]
    if not rows:
        return None
    column: npt.NDArray[Any] = np.full(num, default, dtype)
    for row, value in rows:
        column[row] = value
    return column
