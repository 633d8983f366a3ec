"""The recorder: from one observed tensor to one row of the trace.

In:  `record` calls from probes and adapters, in program order, from any thread.
Out: one `EventBatch` per step, handed to the rank's writer on a background thread.

A row holds numbers only: what an event *is* (its `EventKey`) is interned. The fingerprint is taken
by the queue, on the tensor's own device and stream; row i of a step owns slot i of the queue, so
nothing waits for a device before the step ends.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from upguard_plugin.capture.deferred import DeferredRows, Ticket
from upguard_plugin.capture.position import Position
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import EventKey, Group, Placement, Source
from upguard_plugin.trace.batch import NONE, EventBatch

_FIELDS = ("key", "microbatch", "call", "producer")


@dataclass(frozen=True, slots=True)
class Wire:
    """Where an event stands in the order between ranks (collectives and send/recv)."""

    group_seq: int = NONE
    peer: int = NONE
    tag: int = NONE
    pair_seq: int = NONE


class Writer(Protocol):
    """What the recorder needs of `trace.writer.RankWriter`."""

    @property
    def stopped(self) -> str | None: ...
    def write(self, batch: EventBatch) -> None: ...
    def note(self, sentence: str) -> None: ...
    def close(self, reason: str = "") -> None: ...


class Recorder:
    """Collects the events of one rank. The only one who makes rows."""

    def __init__(self, writer: Writer, queue_: FingerprintQueue) -> None:
        self.position = Position()
        self.active = True  # False outside the selected steps: probes return at once
        self.failure = ""  # why recording ended early
        self._writer = writer
        self._queue = queue_
        self._deferred = DeferredRows(FingerprintQueue(), writer.note)
        self._lock = threading.RLock()
        self._ids: dict[tuple[Any, ...], int] = {}
        self._keys: list[EventKey] = []
        self._rows = array("q")
        self._wires: list[tuple[int, Wire]] = []
        self._values: list[tuple[int, float]] = []
        self._first_seq = 0
        self._batches: queue.Queue[EventBatch | None] = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._drain, name="upguard-writer", daemon=True)
        self._thread.start()

    def record(
        self,
        boundary: str,
        tensor: torch.Tensor,
        *,
        role: str,
        slot: str = "0",
        phase: str | None = None,
        operator: str | None = None,
        moment: str | None = None,
        placement: Placement | None = None,
        microbatch: int | None = None,
        call: int = 0,
        group: Group | None = None,
        op: str | None = None,
        wire: Wire | None = None,
        source: Source | None = None,
        producer: int = NONE,
        value: float | None = None,
    ) -> int:
        """Take the fingerprint of `tensor` now and add its event; returns the event's seq.

        phase and microbatch default to the current position. CPU tensors are hashed before this
        returns, device tensors on their current stream, without waiting.
        """
        position = self.position
        parts = (
            boundary, phase or position.phase, role, slot, tensor.dtype, tensor.shape,
            operator, moment, placement, group, op, source,
        )  # fmt: skip
        with self._lock:
            self._queue.put(tensor, placement)
            row = self._add_row(parts, microbatch, call, producer)
            if wire is not None:
                self._wires.append((row, wire))
            if value is not None:
                self._values.append((row, value))
            return self._first_seq + row

    def reserve(
        self,
        boundary: str,
        tensor: torch.Tensor,
        *,
        role: str,
        slot: str = "0",
        phase: str | None = None,
        operator: str | None = None,
        moment: str | None = None,
        placement: Placement | None = None,
        call: int = 0,
        group: Group | None = None,
        op: str | None = None,
        wire: Wire | None = None,
        source: Source | None = None,
    ) -> Ticket:
        """Add the event of a tensor whose contents are not valid yet; they are not read.

        The event stands here in program order; `fill` or `cancel` must follow, from any thread.
        """
        parts = (
            boundary, phase or self.position.phase, role, slot, tensor.dtype, tensor.shape,
            operator, moment, placement, group, op, source,
        )  # fmt: skip
        with self._lock:
            self._queue.put_words(0)
            row = self._add_row(parts, None, call, NONE)
            if wire is not None:
                self._wires.append((row, wire))
            return self._deferred.reserve(row, boundary, placement)

    def fill(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Take the fingerprint of `tensor` now for a reserved event, as `record` does."""
        self._deferred.fill(ticket, tensor)

    def cancel(self, ticket: Ticket) -> None:
        """Say that a reserved event will never have its tensor; a note in the trace names it."""
        self._deferred.cancel(ticket)

    def record_many(
        self,
        entries: Sequence[tuple[str, torch.Tensor, Placement | None]],
        *,
        role: str,
        slot: str,
        phase: str | None = None,
        operator: str | None = None,
    ) -> None:
        """Record (boundary, tensor, placement) entries that share the rest, hashed in one batch.

        For tensors that nobody overwrites meanwhile: parameters, gradients, optimizer state.
        """
        phase = phase or self.position.phase
        with self._lock:
            self._queue.put_many([e[1] for e in entries], [e[2] for e in entries])
            for boundary, tensor, placement in entries:
                parts = (
                    boundary, phase, role, slot, tensor.dtype, tensor.shape,
                    operator, None, placement, None, None, None,
                )  # fmt: skip
                self._add_row(parts, None, 0, NONE)

    def record_bytes(
        self, boundary: str, data: bytes, *, role: str, slot: str = "0", dtype: str = "uint8",
        phase: str | None = None, call: int = 0, operator: str | None = None,
    ) -> int:  # fmt: skip
        """Record raw bytes: RNG states, strings, None (no bytes, dtype "none")."""
        parts = (
            boundary, phase or self.position.phase, role, slot, dtype, (len(data),),
            operator, None, None, None, None, None,
        )  # fmt: skip
        with self._lock:
            self._queue.put_bytes(data)
            return self._first_seq + self._add_row(parts, None, call, NONE)

    def record_number(
        self, boundary: str, value: float, *, role: str = "scalar", slot: str = "0",
        phase: str | None = None, call: int = 0, operator: str | None = None,
    ) -> int:  # fmt: skip
        """Record a Python number as the 0-dim tensor that holds it exactly."""
        if isinstance(value, bool):
            tensor = torch.tensor(value)
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            tensor = torch.tensor(value, dtype=torch.int64)
        elif isinstance(value, int):
            return self.record_bytes(
                boundary, str(value).encode(), role=role, slot=slot, dtype="int", phase=phase,
                call=call, operator=operator,
            )  # fmt: skip
        else:
            tensor = torch.tensor(value, dtype=torch.float64)
        return self.record(
            boundary, tensor, role=role, slot=slot, phase=phase, call=call, operator=operator,
            value=float(value),
        )  # fmt: skip

    def finish_step(self, *, mark: str | None = None) -> None:
        """Close the step: one device-to-host copy, one batch to the writer, on to the next step."""
        with self._lock:
            batches = self._deferred.close_step(self._take_batch(mark))
            self.position.next_step()
        self._send(batches)

    def select(self, recorded: bool) -> None:
        """Say whether the step that begins is to be recorded."""
        self.active = recorded and not self.failure

    def fail(self, reason: str) -> None:
        """Stop recording for good; training goes on and the trace says why it is incomplete."""
        self.failure = self.failure or reason
        self.active = False

    def note(self, sentence: str) -> None:
        """Say in the trace what capture could not see."""
        self._writer.note(sentence)

    def close(self) -> None:
        """Write what is finished, then end the trace. An unfinished step is not written."""
        self._send(self._deferred.close())
        self._batches.put(None)
        self._thread.join()
        self._writer.close(self.failure)

    def _send(self, batches: Iterable[EventBatch]) -> None:
        for batch in batches:
            if not self.failure:
                self._batches.put(batch)

    def _add_row(
        self, parts: tuple[Any, ...], microbatch: int | None, call: int, producer: int
    ) -> int:
        # Placements and groups are long tuples, too slow to hash for every event; the key table
        # keeps each of them alive, so its id stays its own.
        identity = (*parts[:8], id(parts[8]), id(parts[9]), *parts[10:])
        key = self._ids.get(identity)
        if key is None:
            key = self._intern(parts, identity)
        if microbatch is None:
            microbatch = self.position.microbatch
        rows = self._rows
        rows.extend((key, microbatch, call, producer))
        return len(rows) // len(_FIELDS) - 1

    def _intern(self, parts: tuple[Any, ...], identity: tuple[Any, ...]) -> int:
        dtype, shape = str(parts[4]).removeprefix("torch."), tuple(parts[5])
        self._keys.append(EventKey(*parts[:4], dtype, shape, *parts[6:]))
        self._ids[identity] = len(self._keys) - 1
        return len(self._keys) - 1

    def _take_batch(self, mark: str | None) -> EventBatch | None:
        hashes = self._queue.take()
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, len(_FIELDS))
        columns = {name: rows[:, i] for i, name in enumerate(_FIELDS)}
        num = len(rows)
        self._rows = array("q")
        wires, self._wires = self._wires, []
        values, self._values = self._values, []
        first_seq, self._first_seq = self._first_seq, self._first_seq + num
        if not num or not self.active:
            return None
        has_producer = bool((columns["producer"] != NONE).any())
        return EventBatch(
            step=self.position.step,
            iteration=self.position.iteration,
            mark=mark,
            keys=self._keys,
            key=columns["key"].astype(np.int32),
            seq=np.arange(first_seq, first_seq + num, dtype=np.int64),
            microbatch=columns["microbatch"].astype(np.int32),
            call=columns["call"].astype(np.int32),
            h=hashes.h,
            s=hashes.s,
            producer=columns["producer"].copy() if has_producer else None,
            value=_sparse(num, np.nan, np.float64, values),
            nonfinite=hashes.nonfinite,
            max_abs=hashes.max_abs,
            sketch=hashes.sketch,
            group_seq=_sparse(num, NONE, np.int64, ((r, w.group_seq) for r, w in wires)),
            peer=_sparse(num, NONE, np.int32, ((r, w.peer) for r, w in wires)),
            tag=_sparse(num, NONE, np.int32, ((r, w.tag) for r, w in wires)),
            pair_seq=_sparse(num, NONE, np.int64, ((r, w.pair_seq) for r, w in wires)),
        )

    def _drain(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._writer.write(batch)
            except Exception as error:  # between us and the training job: it must go on
                self.fail(f"the trace could not be written: {error}")
            if self._writer.stopped:
                self.fail(self._writer.stopped)


def _sparse(
    num: int, default: float, dtype: type, entries: Iterable[tuple[int, float]]
) -> np.ndarray | None:
    """A column with a value in the given rows only; None if no row has one."""
    rows = [(row, value) for row, value in entries if value != default or value != value]
    if not rows:
        return None
    column = np.full(num, default, dtype)
    for row, value in rows:
        column[row] = value
    return column
