"""The recorder: from one observed tensor to one row of the trace.

In:  `record` calls from probes and adapters, in program order, from any thread.
Out: one `EventBatch` per step, handed to the rank's writer on a background thread.

The fingerprint is taken by the queue, on the tensor's own device and stream; a row names its slot
of the queue, so nothing waits for a device before the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from upguard_plugin.capture.deferred import Ticket
from upguard_plugin.capture.extents import extent_of
from upguard_plugin.capture.recording import Recording
from upguard_plugin.capture.rows import Wire
from upguard_plugin.capture.slots import Entry
from upguard_plugin.capture.storages import Storage
from upguard_plugin.capture.tensors import as_bytes
from upguard_plugin.capture.writing import Writer
from upguard_plugin.errors import UnsupportedTensorError
from upguard_plugin.fingerprint.parts import wait_for
from upguard_plugin.records import Group, Placement, Source, Stretch
from upguard_plugin.trace.batch import NONE

__all__ = ["Recorder", "Ticket", "Wire", "Writer"]


class Recorder(Recording):
    """Collects the events of one rank. The only one who makes rows."""

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
        wait_for(tensor)
        with self._lock:
            seq = self.record_as(
                self._rows.key_of(parts), tensor, placement, microbatch, call, producer, same_as
            )
            if seq != NONE and wire is not None:
                self._rows.set_wire(seq, wire)
            if seq != NONE and value is not None:
                self._rows.set_value(seq, value)
            return seq

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
        wait_for(tensor)
        with self._lock:
            rows = self._rows
            if same_as != NONE and same_as >= rows.first_seq:
                taken, writer = rows.slot_of(same_as), NONE
            else:
                taken, writer = self._slots.of(key, tensor, placement, storage)
                if taken == NONE:
                    return NONE
            if microbatch is None:
                microbatch = self.position.microbatch
            seq = rows.add(key, microbatch, call, writer if producer == NONE else producer, taken)
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
        if self._dumps.active:
            with self._lock:
                if ticket.step is None:  # else its step is written already
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
        for _, tensor, _ in entries:
            wait_for(tensor)
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
        tensor, view = self._numbers.of(value)
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

    def _add(self, key: int, microbatch: int | None, call: int, producer: int, taken: int) -> int:
        if microbatch is None:
            microbatch = self.position.microbatch
        return self._rows.add(key, microbatch, call, producer, taken)
