"""Which storage was written by whom, and what is known of its bytes.

A tensor that passes from one operator to the next need not be hashed again unless a write can have
happened in between. Version counters do not tell (`.data`, collectives, numpy do not move them), so
writes are tracked here: the probe reports every write that the dispatcher shows. Storages are told
apart by object, never by address alone: an entry holds a weak reference, and while it does, torch
cannot give the address to another storage.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from upguard_plugin.trace.batch import NONE

SAMPLE = (
    32  # of the hashes that need not be taken, one in so many is: writes out of sight show there
)

MAX_EXTENTS = 1024  # of one storage whose writers are remembered; the oldest are forgotten


@dataclass(slots=True)
class Storage:
    """What is known of one storage since its last write."""

    alive: StorageWeakRef
    address: int
    initialised: bool = True
    in_sight: bool = True  # False: something that the dispatcher does not show may write it
    version: int = NONE  # torch's counter when it was last looked at
    known: dict[Hashable, int] = field(default_factory=dict)  # look at it -> slot of its hash
    # (first byte, last byte) -> seq of the event that wrote them last; flat buffers have many.
    _writers: dict[tuple[int, int], int] = field(default_factory=dict)

    def note_writer(self, tensor: torch.Tensor, writer: int) -> None:
        """Remember the event that wrote the bytes of `tensor`."""
        self._writers[_extent(tensor)] = writer
        if len(self._writers) > MAX_EXTENTS:
            newest = sorted(self._writers.items(), key=lambda item: item[1])[MAX_EXTENTS // 2 :]
            self._writers = dict(newest)

    def writer_of(self, tensor: torch.Tensor) -> int:
        """Seq of the last event that wrote some of the bytes of `tensor`, or NONE."""
        if not self._writers:
            return NONE
        first, last = _extent(tensor)
        return max(
            (seq for (low, high), seq in self._writers.items() if low <= last and first <= high),
            default=NONE,
        )


class Storages:
    """The storages that operators have touched."""

    def __init__(self) -> None:
        self._by_address: dict[int, Storage] = {}
        self._room = 4096
        self._reuses = 0

    def of(self, tensor: torch.Tensor) -> Storage:
        """The entry of a tensor's storage, made on first sight."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        entry = self._by_address.get(address)
        if entry is None:
            if len(self._by_address) >= self._room:
                self.prune()
            entry = self._by_address[address] = Storage(StorageWeakRef(storage), address)
        version = _version(tensor)
        if entry.version != version:
            # Something moved the counter: a write that the dispatcher did not show.
            entry.known.clear()
            entry.version = version
        return entry

    def prune(self) -> None:
        """Forget storages that are gone, so that the table does not grow with the run."""
        self._by_address = {
            address: entry
            for address, entry in self._by_address.items()
            if not entry.alive.expired()
        }
        self._room = max(4096, 2 * len(self._by_address))

    def forget_hashes(self) -> None:
        """Drop what is known of all bytes, keep who wrote them. Done between steps."""
        for entry in self._by_address.values():
            entry.known.clear()

    def is_due(self) -> bool:
        """Whether a hash that need not be taken is taken all the same: one in SAMPLE."""
        self._reuses += 1
        return self._reuses % SAMPLE == 0

    def lose_sight(self, tensor: torch.Tensor) -> None:
        """From now on the tensor may be written where the dispatcher does not show it."""
        if is_tracked(tensor):
            entry = self.of(tensor)
            entry.known.clear()
            entry.in_sight, entry.initialised = False, True

    def writing(self, tensor: torch.Tensor, *, in_place: bool) -> None:
        """Note a write by the operator that is running: all that was known of the bytes is void."""
        entry = self.of(tensor)
        entry.known.clear()
        entry.initialised = entry.in_sight = True
        # Autograd moves the counter when an in-place operator returns to it. Where it does not, the
        # next look finds another number and forgets the hashes: a lost short cut, no wrong answer.
        entry.version += in_place


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage with its bytes in it."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_traceable_wrapper_subclass(tensor)
    )


def _version(tensor: torch.Tensor) -> int:
    return NONE if tensor.is_inference() else tensor._version


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of the storage that the tensor reaches."""
    first = tensor.storage_offset()
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    size = tensor.element_size()
    return first * size, (last + 1) * size - 1


def look(tensor: torch.Tensor) -> Hashable:
    """How a tensor looks at its storage: equal looks at unwritten bytes have equal fingerprints."""
    if tensor.is_contiguous():
        # A reshape leaves the fingerprint as it is.
        return (tensor.storage_offset() * tensor.element_size(), tensor.numel(), tensor.dtype)
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
