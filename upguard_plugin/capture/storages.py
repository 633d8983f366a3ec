"""Which storage was written by whom, and what is known of its bytes.

A tensor that passes from one operator to the next need not be hashed again unless a write can have
happened in between. Version counters do not tell (`.data`, collectives, numpy do not move them), so
writes are tracked here: the probe reports every write that the dispatcher shows. Storages are told
apart by object, never by address alone: an entry holds a weak reference, and while it does, torch
cannot give the address to another storage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from upguard_plugin.capture.blank_bytes import BlankBytes
from upguard_plugin.capture.extents import Extent, extent_of, is_tracked, look, storage_data_ptr
from upguard_plugin.fingerprint.parts import PLAIN_TYPES
from upguard_plugin.fingerprint.spots import read_spots
from upguard_plugin.records import Placement
from upguard_plugin.trace.batch import NONE

# Of the hashes that need not be taken, one in so many is: writes out of sight show there.
SAMPLE = 32
FEW_BYTES = 8 << 10  # below it a hash of them costs hardly more than a glance
MAX_EXTENTS = 1024  # of one storage whose writers are remembered; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a storage whose elements are those of a named tensor, in order."""

    first: int
    stop: int
    name: str
    offset: int  # element of that tensor at the first byte
    element_size: int


@dataclass(slots=True, eq=False)
class Storage(BlankBytes):
    """What is known of one storage since its last write.

    Made for nearly every operator: what there is mostly one of is held without a table.
    """

    weak: int  # torch's weak reference to it, which this entry gives back
    address: int  # of its bytes; this and their number change when it is resized
    size: int
    in_sight: bool  # False: something that the dispatcher does not show may write it
    on_host: bool  # in memory of the CPU
    exposed: bool = False  # in_sight stays False: its memory was handed out of torch
    version: int = NONE  # torch's counter when it was last looked at
    written_in: str = ""  # phase of the last write that was seen
    # Slots of the hashes taken since then, by what was seen of the bytes at a glance.
    _seen: Hashable = None
    _slot: int = NONE
    _slots: dict[Hashable, int] | None = None  # by what else was seen
    # Who wrote which bytes last: most storages have one writer, a flat buffer has many.
    _first: int = NONE
    _last: int = NONE
    _writer: int = NONE
    _writers: dict[Extent, int] | None = None  # all of them, once there is another
    holds: Sequence[Held] = ()  # whose elements its bytes are; kept by contents.py

    # Held by the class: when Python ends, modules are emptied before the last entry goes.
    _free_weak_ref = staticmethod(torch.UntypedStorage._free_weak_ref)
    _expired = staticmethod(torch.UntypedStorage._expired)

    def __del__(self) -> None:
        self._free_weak_ref(self.weak)

    def is_gone(self) -> bool:
        """Whether nobody holds the storage any more."""
        return bool(self._expired(self.weak))

    def look(self, tensor: torch.Tensor) -> Hashable:
        """As `extents.look`; its dtype if its bytes are those of the storage, one by one."""
        if (
            tensor.nbytes == self.size
            and type(tensor) in PLAIN_TYPES
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and not tensor.is_quantized
        ):
            return tensor.dtype
        return look(tensor)

    def slot_of(self, tensor: torch.Tensor, view: Hashable, placement: Placement | None) -> int:
        """The slot of the hash of the tensor's bytes as they are now; NONE if none is known.

        view: how it looks at them, from `look`.
        """
        if self._seen is None:
            return NONE
        seen = self._glance(tensor, view, placement)
        if self._seen == seen:
            return self._slot
        return NONE if self._slots is None else self._slots.get(seen, NONE)

    def remember(
        self, slot: int, tensor: torch.Tensor, view: Hashable, placement: Placement | None
    ) -> None:
        """Note the slot of the hash just taken."""
        seen = self._glance(tensor, view, placement)
        if seen is None:
            return
        if self._seen is None or self._seen == seen:
            self._seen, self._slot = seen, slot
        elif self._slots is None:
            self._slots = {seen: slot}
        else:
            self._slots[seen] = slot

    def forget(self) -> None:
        """Drop the hashes: the bytes may be others now."""
        self._seen = self._slots = None

    def _glance(
        self, tensor: torch.Tensor, view: Hashable, placement: Placement | None
    ) -> Hashable:
        """What is seen of a tensor's bytes at a glance, and how it looks at them.

        None: they are so few that to hash them again costs no more.
        """
        spots = 0
        if self.on_host:
            if tensor.nbytes < FEW_BYTES:
                return None
            if type(view) is torch.dtype:
                spots = read_spots(self.address, self.size)
            else:
                first, last = extent_of(tensor)
                if self.address and last < self.size:  # memory may have been given back
                    spots = read_spots(self.address + first, last - first + 1)
        return (spots, view, id(placement))

    def writing(self, tensor: torch.Tensor, phase: str, in_place: bool) -> None:
        """Note a write by the operator that is running: all that was known of the bytes is void."""
        self._seen = self._slots = None
        if self._blank:
            self.fill(tensor)
        self.in_sight = not self.exposed
        self.written_in = phase
        # Autograd moves the counter when an in-place operator returns to it. Where it does not, the
        # next look finds another number and forgets the hashes: a lost short cut, no wrong answer.
        self.version += in_place

    def note_writer(self, extent: Extent, writer: int) -> None:
        """Remember the event that wrote these bytes."""
        first, last = extent
        writers = self._writers
        if writers is None:
            if self._first == NONE or (first <= self._first and self._last <= last):
                self._first, self._last, self._writer = first, last, writer
                return
            writers = self._writers = {(self._first, self._last): self._writer}
        if extent not in writers:
            covered = [e for e in writers if first <= e[0] and e[1] <= last]
            for other in covered:
                del writers[other]
        writers[extent] = writer
        if len(writers) > MAX_EXTENTS:
            newest = sorted(writers.items(), key=lambda item: item[1])[MAX_EXTENTS // 2 :]
            self._writers = dict(newest)

    def writer_of(self, tensor: torch.Tensor) -> int:
        """Seq of the last event that wrote some of the tensor's bytes, or NONE."""
        if self._first == NONE:
            return NONE
        first, last = extent_of(tensor)
        if self._writers is None:
            return self._writer if self._first <= last and first <= self._last else NONE
        newest = NONE
        for (low, high), seq in self._writers.items():
            if low <= last and first <= high and seq > newest:
                newest = seq
        return newest

    def make_blank(self) -> None:
        """Its bytes are whatever memory held before: no value of the run."""
        self.forget()
        self.holds = ()
        self._first, self._writer, self._writers = NONE, NONE, None
        self._blank, self._filled = ((0, self.size - 1),), 0
        self._told, self.pads = (), False

    def forget_held(self, tensor: torch.Tensor) -> None:
        """What the bytes that the tensor reaches were is not known any more."""
        if not self.holds:
            return
        begin, last = extent_of(tensor)
        kept = []
        for held in self.holds:
            for first, stop in ((held.first, min(held.stop, begin)), (last + 1, held.stop)):
                first = max(first, held.first)
                if first < stop:
                    offset = held.offset + (first - held.first) // held.element_size
                    kept.append(Held(first, stop, held.name, offset, held.element_size))
        self.holds = kept

    def grow_blank(self, old_bytes: int) -> None:
        """Its memory has grown from so many bytes; the new ones are blank."""
        if self.size > old_bytes:
            self._blank = (*self._blank, (old_bytes, self.size - 1))

    def lose_sight(self, for_good: bool) -> None:
        """Something that the dispatcher does not show may write it from now on."""
        self.forget()
        self.forget_blank()
        self.in_sight = False
        self.exposed |= for_good


class Storages:
    """The storages that operators have touched."""

    def __init__(self) -> None:
        self._by_address: dict[int, Storage] = {}  # by where torch keeps the storage
        self._room = 4096
        self._reuses = 0
        self.have_padding = False  # whether some of them had blank bytes among others
        self.sample = SAMPLE  # 1: no hash is used again
        self.hold_names = False  # whether any entry ever had something in `holds`

    def __len__(self) -> int:
        return len(self._by_address)

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """The entry of a tensor's storage, made on first sight; None: it is not tracked."""
        if type(tensor) not in PLAIN_TYPES and not is_tracked(tensor):
            return None
        try:
            storage = tensor.untyped_storage()
            address, size = storage_data_ptr(storage), storage.nbytes()
        except RuntimeError:  # sparse, or zeros without memory, as autograd makes them for tangents
            return None
        entry = self._by_address.get(storage._cdata)
        if entry is None:
            if not is_tracked(tensor):
                return None
            entry = self._enter(storage, address, size, tensor.is_cpu)
        try:
            version = tensor._version
        except RuntimeError:  # of an inference tensor, which does not count
            version = NONE
        if entry.version != version or entry.address != address or entry.size != size:
            # Something moved the counter or the bytes: a write that the dispatcher did not show.
            entry.forget()
            entry.version, entry.address, entry.size = version, address, size
        return entry

    def _enter(self, storage: Any, address: int, size: int, on_host: bool) -> Storage:
        if len(self._by_address) >= self._room:
            self.prune()
        # Memory that torch did not allocate belongs to somebody who may write it.
        own = storage.resizable()
        entry = Storage(storage._weak_ref(), address, size, own, on_host, not own)
        self._by_address[storage._cdata] = entry
        return entry

    def prune(self) -> None:
        """Forget storages that are gone, so that the table does not grow with the run."""
        known = self._by_address.items()
        self._by_address = {key: entry for key, entry in known if not entry.is_gone()}
        self._room = max(4096, 2 * len(self._by_address))

    def forget_hashes(self) -> None:
        """Drop what is known of all bytes, keep who wrote them."""
        for entry in self._by_address.values():
            entry.forget()

    def end_step(self) -> None:
        """As `forget_hashes`, and forget storages that are gone."""
        self.prune()
        self.forget_hashes()

    def forget_all(self) -> None:
        """Drop everything but what may be written out of sight: writes were not tracked."""
        self._by_address = {a: e for a, e in self._by_address.items() if not e.in_sight}

    def is_due(self) -> bool:
        """Whether a hash that need not be taken is taken all the same: one in `sample`."""
        self._reuses += 1
        return self._reuses % self.sample == 0

    def lose_sight(self, tensor: torch.Tensor, *, for_good: bool = False) -> None:
        """The tensor may be written where the dispatcher does not show it.

        Until the dispatcher shows a write; or for_good: somebody keeps the address.
        """
        entry = self.find(tensor)
        if entry is not None:
            entry.lose_sight(for_good)

    def hand_out(self, storage: torch.UntypedStorage) -> None:
        """Somebody gets the address of a storage, without a tensor to tell its version."""
        entry = self._by_address.get(storage._cdata)
        if entry is None:
            address, size = storage_data_ptr(storage), storage.nbytes()
            entry = self._enter(storage, address, size, storage.device.type == "cpu")
        entry.lose_sight(for_good=True)
