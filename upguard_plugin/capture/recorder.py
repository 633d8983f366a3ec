"""The recorder: from one observed tensor to one row of the trace.

In:  `record` calls from probes and adapters, in program order, from any thread.
Out: one `EventBatch` per step, handed to the rank's writer on a background thread.

The fingerprint is taken by the queue, on the tensor's own device and stream; a row names its slot
of the queue, so nothing waits for a device before the step ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
import torch

from upguard_plugin.capture.deferred import DeferredRows, Ticket
from upguard_plugin.capture.dumps import Dumps
from upguard_plugin.capture.position import Position
from upguard_plugin.capture.rows import Rows, Wire
from upguard_plugin.capture.slots import Entry, Slots
from upguard_plugin.capture.storages import Storage, Storages, extent_of
from upguard_plugin.capture.tensors import as_bytes
from upguard_plugin.capture.writing import Writer, WritingThread
from upguard_plugin.config import Dump
from upguard_plugin.errors import UnsupportedTensorError
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import PHASES, ROLES, Group, Placement, Source, Stretch
from upguard_plugin.trace.batch import NONE, EventBatch

_NUMBER_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}

__all__ = ["Recorder", "Ticket", "Wire", "Writer"]


class Recorder:
    """Collects the events of one rank. The only one who makes rows."""

    def __init__(
        self,
        writer: Writer,
        queue_: FingerprintQueue,
        roles: Iterable[str] = (),
        phases: Iterable[str] = (),
        dump: Dump | None = None,
    ) -> None:
        """roles, phases: those to record; none: all. dump: tensors to keep whole."""
        self.position = Position()
        self.active = True  # False outside the selected steps: probes return at once
        self.failure = ""  # why recording ended early
        self._writer = writer
        self._queue = queue_
        self._deferred = DeferredRows(FingerprintQueue(sketch_size=queue_.sketch_size), writer.note)
        self._lock = threading.RLock()
        self._rows = Rows()
        self._slots = Slots(queue_, self._rows.boundary_of, self.note)
        self._dumps = Dumps(dump)
        self._noted: set[str] = set()
        self._left_out = frozenset(ROLES) - frozenset(roles or ROLES)
        self.phases_left_out = frozenset(PHASES) - frozenset(phases or PHASES)
        self._numbers = {kind: _number_of(dtype) for kind, dtype in _NUMBER_TYPES.items()}
        self.writing = WritingThread(writer, self)

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
        same_as: int = NONE,
        holds: tuple[Stretch, ...] = (),
    ) -> int:
        """Take the fingerprint of `tensor` now and add its event; returns the event's seq.

        phase and microbatch default to the current position. CPU tensors are hashed before this
        returns, device tensors on their current stream, without waiting. same_as: an event of this
        step that has the fingerprint of this very tensor already. Returns NONE where nothing was
        recorded: the role is not selected, or the tensor has no plain bytes (that is noted).
        """
        phase = phase or self.position.phase
        if role in self._left_out or phase in self.phases_left_out:
            return NONE
        parts = (
            boundary, phase, role, slot, tensor.dtype, tensor.shape,
            operator, moment, placement, group, op, source, holds,
        )  # fmt: skip
        with self._lock:
            seq = self.record_as(
                self._rows.key_of(parts), tensor, placement, microbatch, call, producer, same_as
            )
            if seq != NONE and wire is not None:
                self._rows.set_wire(seq, wire)
            if seq != NONE and value is not None:
                self._rows.set_value(seq, value)
            return seq

    @property
    def storages(self) -> Storages | None:
        """Who wrote which storage; None where writes are not tracked."""
        return self._slots.storages

    @storages.setter
    def storages(self, storages: Storages | None) -> None:
        self._slots.storages = storages

    def wants(self, role: str) -> bool:
        """Whether events of this role are recorded at all."""
        return role not in self._left_out

    def key_of(
        self, boundary: str, tensor: torch.Tensor, *, role: str, slot: str, phase: str,
        operator: str | None, placement: Placement | None, source: Source | None = None,
        moment: str | None = None,
    ) -> int:  # fmt: skip
        """The number under which events of this kind are recorded; NONE for a role left out.

        For call sites that see the same kind of event many times: `record_as` is half of `record`.
        """
        if role in self._left_out or phase in self.phases_left_out:
            return NONE
        parts = (
            boundary, phase, role, slot, tensor.dtype, tensor.shape,
            operator, moment, placement, None, None, source,
        )  # fmt: skip
        with self._lock:
            return self._rows.key_of(parts)

    def record_as(
        self, key: int, tensor: torch.Tensor, placement: Placement | None = None,
        microbatch: int | None = None, call: int = 0, producer: int = NONE, same_as: int = NONE,
        storage: Storage | None = None,
    ) -> int:  # fmt: skip
        """As `record`, with all that does not change given as a `key_of` this kind of tensor.

        storage: what `storages` has of this tensor, if the caller has looked it up already.
        """
        if key == NONE:
            return NONE
        with self._lock:
            if same_as >= self._rows.first_seq:
                taken, writer = self._rows.slot_of(same_as), NONE
            else:
                taken, writer = self._slots.of(key, tensor, placement, storage)
            if taken == NONE:
                return NONE
            producer = writer if producer == NONE else producer
            seq = self._add(key, microbatch, call, producer, taken)
            if self._dumps.active:
                self._dumps.keep(seq, self._rows.boundary_of(key), tensor)
            return seq

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
        holds: tuple[Stretch, ...] = (),
    ) -> Ticket | None:
        """Add the event of a tensor whose contents are not valid yet; they are not read.

        The event stands here in program order; `fill` or `cancel` must follow, from any thread.
        Returns None where nothing was added: the role is not selected.
        """
        phase = phase or self.position.phase
        if role in self._left_out or phase in self.phases_left_out:
            return None
        parts = (
            boundary, phase, role, slot, tensor.dtype, tensor.shape,
            operator, moment, placement, group, op, source, holds,
        )  # fmt: skip
        with self._lock:
            taken = self._queue.put_words(0)
            seq = self._add(self._rows.key_of(parts), None, call, NONE, taken)
            if wire is not None:
                self._rows.set_wire(seq, wire)
            storage = None if self.storages is None else self.storages.find(tensor)
            if self.storages is not None and storage is not None and role == "output":
                self.storages.lose_sight(tensor)
                storage.note_writer(extent_of(tensor), seq)
            return self._deferred.reserve(seq - self._rows.first_seq, boundary, placement)

    def fill(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Take the fingerprint of `tensor` now for a reserved event, as `record` does."""
        try:
            self._deferred.fill(ticket, tensor)
        except UnsupportedTensorError as error:
            self.note(f"a tensor of {ticket.boundary} was not recorded: {error.sentence}")
            self._deferred.cancel(ticket)
            return
        with self._lock:
            if self._dumps.active and ticket.step is None:  # else its step is written already
                self._dumps.keep(self._rows.first_seq + ticket.row, ticket.boundary, tensor)

    def cancel(self, ticket: Ticket) -> None:
        """Say that a reserved event will never have its tensor; a note in the trace names it."""
        self._deferred.cancel(ticket)

    def record_many(
        self,
        entries: Sequence[Entry],
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
        if role in self._left_out or phase in self.phases_left_out:
            return
        with self._lock:
            slots = self._slots.of_many(entries, phase)
            for (boundary, tensor, placement), taken in zip(entries, slots, strict=True):
                if taken == NONE:
                    continue
                parts = (
                    boundary, phase, role, slot, tensor.dtype, tensor.shape,
                    operator, None, placement, None, None, None,
                )  # fmt: skip
                seq = self._add(self._rows.key_of(parts), None, 0, NONE, taken)
                if self._dumps.active:
                    self._dumps.keep(seq, boundary, tensor)

    def record_bytes(
        self, boundary: str, data: bytes, *, role: str, slot: str = "0", dtype: str = "uint8",
        phase: str | None = None, call: int = 0, operator: str | None = None,
        moment: str | None = None, microbatch: int | None = None,
    ) -> int:  # fmt: skip
        """Record raw bytes: RNG states, strings, None (no bytes, dtype "none")."""
        phase = phase or self.position.phase
        if role in self._left_out or phase in self.phases_left_out:
            return NONE
        parts = (
            boundary, phase, role, slot, dtype, (len(data),),
            operator, moment, None, None, None, None,
        )  # fmt: skip
        with self._lock:
            taken = self._queue.put_bytes(data)
            return self._add(self._rows.key_of(parts), microbatch, call, NONE, taken)

    def record_number(
        self, boundary: str, value: float, *, role: str = "scalar", slot: str = "0",
        phase: str | None = None, call: int = 0, operator: str | None = None,
        microbatch: int | None = None, moment: str | None = None,
    ) -> int:  # fmt: skip
        """Record a Python number as the 0-dim tensor that holds it exactly."""
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return self.record_bytes(
                boundary, f"{value:x}".encode(), role=role, slot=slot, dtype="int", phase=phase,
                call=call, operator=operator, microbatch=microbatch, moment=moment,
            )  # fmt: skip
        kind = next((k for k in _NUMBER_TYPES if isinstance(value, k)), float)
        tensor, view = self._numbers[kind]
        with self._lock:
            # Written through numpy: an operator of torch here would be seen by dispatch modes. So
            # nobody knows of the write, and a hash of it must not be used again.
            if self.storages is not None:
                self.storages.lose_sight(tensor)
            view[()] = value
            return self.record(
                boundary, tensor, role=role, slot=slot, phase=phase, call=call,
                operator=operator, value=float(value), microbatch=microbatch, moment=moment,
            )  # fmt: skip

    def record_value(
        self, boundary: str, value: object, *, role: str, slot: str = "0",
        phase: str | None = None, call: int = 0, operator: str | None = None,
        microbatch: int | None = None, moment: str | None = None,
    ) -> int:  # fmt: skip
        """Record a leaf of `tensors_in` that is no tensor: a number, text, bytes, None."""
        if isinstance(value, bool | int | float) and not isinstance(value, Enum):
            return self.record_number(
                boundary, value, role=role, slot=slot, phase=phase, call=call, operator=operator,
                microbatch=microbatch, moment=moment,
            )  # fmt: skip
        data, dtype = as_bytes(value)
        return self.record_bytes(
            boundary, data, role=role, slot=slot, dtype=dtype, phase=phase, call=call,
            operator=operator, microbatch=microbatch, moment=moment,
        )  # fmt: skip

    def finish_step(self, *, mark: str | None = None) -> None:
        """Close the step: one device-to-host copy, one batch to the writer, on to the next step."""
        with self._lock:
            tensors = self._dumps.take()
            if tensors and self.active:
                self._writer.write_tensors(f"step{self.position.step}", tensors)
            batches = self._deferred.close_step(self._take_batch(mark))
            self.position.next_step()
        self.writing.send(batches)

    def select(self, recorded: bool) -> None:
        """Say whether the step that begins is to be recorded."""
        self.active = recorded and not self.failure
        self._dumps.select(self.position.step)

    def fail(self, reason: str) -> None:
        """Stop recording for good; training goes on and the trace says why it is incomplete."""
        self.failure = self.failure or reason
        self.active = False

    def note(self, sentence: str) -> None:
        """Say in the trace, once, what capture could not see."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._writer.note(sentence)

    def close(self) -> None:
        """Write what is finished, then end the trace. An unfinished step is not written."""
        self.writing.send(self._deferred.close())
        self.writing.close()

    def _add(self, key: int, microbatch: int | None, call: int, producer: int, taken: int) -> int:
        if microbatch is None:
            microbatch = self.position.microbatch
        return self._rows.add(key, microbatch, call, producer, taken)

    def _take_batch(self, mark: str | None) -> EventBatch | None:
        hashes = self._queue.take()
        if self.storages is not None:
            self.storages.forget_hashes()  # slots are numbered anew in each step
        batch = self._rows.take(hashes, self.position, mark)
        return batch if self.active else None


def _number_of(dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """A 0-dim CPU tensor to put numbers in, and numpy's view of it."""
    with torch._C._DisableTorchDispatch():  # for no mode to see
        tensor = torch.zeros((), dtype=dtype, device="cpu")
        return tensor, tensor.numpy()
