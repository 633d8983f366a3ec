"""Slots of the fingerprint queue: which one holds a tensor's fingerprint.

In:  a tensor, and what is known of its storage where writes are tracked.
Out: the number of a slot: a new one, hashed now, or that of an event that saw the same bytes; NONE,
     noted, for a tensor that has no plain bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from upguard_plugin.capture.storages import Storage, Storages
from upguard_plugin.errors import UnsupportedTensorError
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import Placement
from upguard_plugin.trace.batch import NONE

Entry = tuple[str, torch.Tensor, Placement | None]  # boundary, tensor, placement


class Slots:
    """Hashes what was not hashed already."""

    def __init__(
        self,
        queue: FingerprintQueue,
        boundary_of: Callable[[int], str],
        note: Callable[[str], None],
    ) -> None:
        """boundary_of: the boundary of an event key's number."""
        self.storages: Storages | None = None  # set where writes are tracked (level op)
        self._queue = queue
        self._sketches = queue.sketch_size > 0
        self._is_plain = queue.is_plain
        self._boundary_of = boundary_of
        self._note = note

    def of(
        self,
        key: int,
        tensor: torch.Tensor,
        placement: Placement | None,
        storage: Storage | None,
    ) -> tuple[int, int]:
        """The slot of the tensor's fingerprint, and the seq of the event that wrote it last."""
        storages = self.storages
        if storages is not None and storage is None:
            storage = storages.find(tensor)
        if storages is None or storage is None:
            return self._put(self._boundary_of(key), tensor, placement), NONE
        view = storage.look(tensor)
        slot = storage.slot_of(tensor, view, placement)
        if slot == NONE or storages.is_due():
            plain = self._is_plain and placement is None and storage.on_host and storage.size
            if plain and isinstance(view, torch.dtype):
                slot = self._queue.put_memory(storage.address, storage.size, view)
            else:
                slot = self._put(self._boundary_of(key), tensor, placement)
            if storage.in_sight and slot != NONE:
                storage.remember(slot, tensor, view, placement)
        return slot, storage.writer_of(tensor)

    def of_many(self, entries: Sequence[Entry], phase: str) -> Sequence[int]:
        """The slots of tensors that are hashed in one batch; NONE where one can have none."""
        slots = [self._slot_of_writer(entry, phase) for entry in entries]
        fresh = [entry for entry, slot in zip(entries, slots, strict=True) if slot == NONE]
        try:
            taken = self._queue.put_many(
                [e[1] for e in fresh], [e[2] for e in fresh], sketch=self._sketches
            )
        except UnsupportedTensorError:  # nothing was taken; find out which it was
            return [self._put(*entry) for entry in entries]
        hashed = iter(taken)
        return [next(hashed) if slot == NONE else slot for slot in slots]

    def _put(self, boundary: str, tensor: torch.Tensor, placement: Placement | None) -> int:
        """The slot of the tensor's fingerprint, or NONE, noted, if it can have none."""
        try:
            return self._queue.put(tensor, placement, sketch=self._sketches)
        except UnsupportedTensorError as error:
            self._note(f"a tensor of {boundary} was not recorded: {error.sentence}")
            return NONE

    def _slot_of_writer(self, entry: Entry, phase: str) -> int:
        """The slot of a tensor that an operator wrote in this very phase, as far as is known."""
        _, tensor, placement = entry
        storage = None if self.storages is None else self.storages.find(tensor)
        if storage is None or storage.written_in != phase or placement is not None:
            return NONE
        if self.storages is not None and self.storages.sample == 1:
            return NONE
        return storage.slot_of(tensor, storage.look(tensor), None)
