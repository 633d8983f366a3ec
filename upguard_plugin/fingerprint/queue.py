"""Fingerprints on the hot path: tensors in, slots out, all values once per step.

In:  tensors in the order of the program, each on its own device and stream.
Out: `take()` gives the hashes of all slots since the last call, in order.

A CPU tensor is hashed before `put` returns; a CUDA tensor by a kernel on its current stream, whose
result stays on the device until `take`. Not thread-safe: one queue per recording thread, or a lock
around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from upguard_plugin.fingerprint import cpu
from upguard_plugin.fingerprint.cache import cache_note
from upguard_plugin.fingerprint.cpu import SWEEP_COLUMNS, hash_many_sweeps, hash_run, hash_sweeps
from upguard_plugin.fingerprint.devices import DeviceSlots, device_slots, is_small
from upguard_plugin.fingerprint.keys import FINGERPRINT_PRIME, MASK64
from upguard_plugin.fingerprint.measure import SCRATCH_BYTES, measure_sweeps
from upguard_plugin.fingerprint.parts import PLAIN_TYPES, Part, check_host, data_ptr, dense_parts
from upguard_plugin.fingerprint.rows import Plans, Rows, has_numbers, sweep_table
from upguard_plugin.fingerprint.sketch import check_size
from upguard_plugin.fingerprint.threads import LONG_BYTES, hash_run_parallel
from upguard_plugin.records import Placement

NOT_COUNTED = -1
# A view of freed storage has its offset for an address. Below this, as where an allocator's heap
# follows a program at a low address, the storage is asked.
LOW_ADDRESS = 1 << 44


@dataclass(frozen=True, slots=True)
class Hashes:
    """What a queue took, one row per slot. Optional columns are None where not asked for."""

    h: npt.NDArray[np.uint64]
    s: npt.NDArray[np.uint64]
    nonfinite: npt.NDArray[np.int64] | None = None  # NOT_COUNTED where there are no numbers
    max_abs: npt.NDArray[np.float64] | None = None  # of the finite elements; NaN likewise
    sketch: npt.NDArray[np.float64] | None = None  # [slots, K]; a row of NaN where none was taken

    def __len__(self) -> int:
        return len(self.h)


class FingerprintQueue:
    """Hashes tensors in program order; a slot is the number of a tensor since the last `take`.

    magnitudes: count non-finite elements and find the largest magnitude of each tensor.
    sketch_size: buckets of the sketches that `put(..., sketch=True)` takes; 0: none are taken. What
    is sketched is counted and measured too.
    Raises UsageError for an impossible sketch size, UnsupportedTensorError on a big-endian host.
    """

    def __init__(self, *, magnitudes: bool = False, sketch_size: int = 0) -> None:
        check_host()
        self._magnitudes = magnitudes
        self._sketch_size = check_size(sketch_size) if sketch_size else 0
        self._slots = self._room = 0  # slots in use, and those there is room for
        self._pairs = Rows(2, np.uint64, 0)  # h and s of each slot
        self._measures = Rows(2 + self._sketch_size, np.float64, np.nan)
        self._scratch = np.zeros(max(SCRATCH_BYTES, cpu.SCRATCH_BYTES), np.uint8)
        self._scratch_address = self._scratch.ctypes.data
        self._plans = Plans()
        self._devices: dict[torch.device, DeviceSlots] = {}

    def __len__(self) -> int:
        return self._slots

    @property
    def sketch_size(self) -> int:
        """Buckets of the sketches that this queue takes; 0: none."""
        return self._sketch_size

    @property
    def is_plain(self) -> bool:
        """Whether nothing but fingerprints is taken: no magnitudes, no sketches."""
        return not (self._magnitudes or self._sketch_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the manifest should say of how tensors were hashed, in whole sentences."""
        found = [slots.note for slots in self._devices.values()] + [cache_note()]
        return tuple(dict.fromkeys(note for note in found if note))

    def put(
        self, tensor: Tensor, placement: Placement | None = None, *, sketch: bool = False
    ) -> int:
        """Hash one tensor and return its slot. Never waits for a CUDA device.

        placement: its part of a logical tensor; None: what a DTensor says of itself, else it is
        hashed at offset 0, as a whole.
        Raises PlacementError if the placement does not fit, UnsupportedTensorError if the tensor
        has no plain bytes; no slot is used then.
        """
        if (
            placement is None
            and not self._magnitudes
            and not (sketch and self._sketch_size)
            and (address := _plain_address(tensor))
        ):
            return self.put_memory(address, tensor.nbytes, tensor.dtype)
        with torch._C._DisableTorchDispatch():  # none of the training's operators: no mode sees it
            return self._put_parts(dense_parts(tensor, placement), sketch)

    def put_memory(self, address: int, num_bytes: int, dtype: torch.dtype) -> int:
        """Hash bytes of the host as a dense tensor of a plain dtype; takes nothing else."""
        slot = self._slots
        if slot >= self._room:
            self._reserve(1)
        self._slots = slot + 1
        hasher = hash_run if num_bytes < LONG_BYTES else hash_run_parallel
        hasher(address, num_bytes, 0, int(dtype.itemsize >= 8), self._pairs.address + 16 * slot)
        return slot

    def put_many(
        self,
        tensors: Sequence[Tensor],
        placements: Sequence[Placement | None] | None = None,
        *,
        sketch: bool = False,
    ) -> range:
        """Hash many tensors, small plain ones in one kernel call; returns their slots.

        All or none: if one is refused, no slot is used. As `put` in all else.
        """
        first = self._slots
        together = not self._magnitudes and not (sketch and self._sketch_size)
        rows: list[tuple[int, ...]] = []
        small: dict[torch.device, list[tuple[int, Tensor]]] = {}
        self._reserve(len(tensors))
        try:
            for i, tensor in enumerate(tensors):
                placement = placements[i] if placements is not None else None
                if together and placement is None and (address := _plain_address(tensor)):
                    num_bytes = tensor.nbytes
                    if num_bytes < LONG_BYTES:
                        rows.append((self._slots, address, num_bytes, tensor.itemsize >= 8))
                        self._slots += 1
                        continue
                if together and placement is None and not tensor.is_cpu and is_small(tensor):
                    small.setdefault(tensor.device, []).append((self._next_slot(), tensor))
                    continue
                self.put(tensor, placement, sketch=sketch)
        except BaseException:
            self._forget(first)
            raise
        if rows:
            table = np.zeros((len(rows), SWEEP_COLUMNS), np.int64)
            table[:, [0, 1, 3, 4]] = np.array(rows, np.int64)
            where = (table.ctypes.data, len(rows), self._pairs.address)
            hash_many_sweeps(*where, self._scratch_address)
        for device, entries in small.items():
            slots, short = zip(*entries, strict=True)
            self._slots_of(device).put_many(slots, short)
        return range(first, self._slots)

    def put_bytes(self, data: bytes | bytearray | memoryview) -> int:
        """Hash raw bytes, as a uint8 tensor of the same bytes would be hashed."""
        array = np.frombuffer(data, np.uint8)
        slot = self._next_slot()
        hash_run(array.ctypes.data, array.nbytes, 0, 0, self._pairs.address + 16 * slot)
        return slot

    def put_words(self, h: int, s: int = 0) -> int:
        """Take a slot for a value that was hashed elsewhere."""
        slot = self._next_slot()
        self._pairs.values[slot] = (h % FINGERPRINT_PRIME, s & MASK64)
        return slot

    def take(self) -> Hashes:
        """The hashes of all slots since the last call, in order; the queue is empty afterwards.

        Waits for the devices whose tensors were put, with one copy for each.
        """
        pairs, measures = self._pairs.values, self._measures.values
        for device in self._devices.values():
            device.take_into(pairs, measures)
        taken = pairs[: self._slots].T.copy()
        measured = measures[: self._slots].copy()
        self._forget(0)
        nonfinite, max_abs, sketch = None, None, None
        if self._magnitudes or self._sketch_size:
            counts = np.where(np.isnan(measured[:, 0]), NOT_COUNTED, measured[:, 0])
            nonfinite, max_abs = counts.astype(np.int64), measured[:, 1].copy()
        if self._sketch_size:
            sketch = measured[:, 2:].copy()
        return Hashes(taken[0], taken[1], nonfinite, max_abs, sketch)

    def _put_parts(self, parts: tuple[Part, ...], sketch: bool) -> int:
        size = self._sketch_size if sketch else 0
        measured = bool(self._magnitudes or size) and has_numbers(parts)
        planned = self._plans.plan_all(parts, tiles=not measured)
        slot = self._next_slot()
        if not parts[0].tensor.is_cpu:
            self._slots_of(parts[0].tensor.device).put(slot, planned, measured, size)
            return slot
        table, scratch = sweep_table(slot, planned), self._scratch_address
        where = (table.ctypes.data, len(table), self._pairs.address)
        if not measured:
            short = sum(part.tensor.nbytes for part in parts) < LONG_BYTES
            (hash_sweeps if short else hash_many_sweeps)(*where, scratch)
            return slot
        self._measures.values[slot, : 2 + size] = 0.0
        columns = 2 + self._sketch_size
        measure_sweeps(*where, self._measures.address, columns, size, scratch)
        return slot

    def _slots_of(self, device: torch.device) -> DeviceSlots:
        if device not in self._devices:
            self._devices[device] = device_slots(device, self._sketch_size)
        return self._devices[device]

    def _next_slot(self) -> int:
        slot = self._slots
        if slot >= self._room:
            self._reserve(1)
        self._slots = slot + 1
        return slot

    def _reserve(self, count: int) -> None:
        self._pairs.reserve(self._slots + count)
        self._room = len(self._pairs.values)
        if self._magnitudes or self._sketch_size:
            self._measures.reserve(self._slots + count)

    def _forget(self, first: int) -> None:
        self._pairs.clear(first, self._slots)
        self._measures.clear(first, self._slots)
        for device in self._devices.values():
            device.forget(first)
        self._slots = first


def _plain_address(tensor: Tensor) -> int:
    """Where a tensor's bytes lie in host memory as they are hashed, or 0 if that needs a look."""
    if (
        type(tensor) in PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_quantized
        and (address := data_ptr(tensor))
        and (address >= LOW_ADDRESS or tensor.untyped_storage().nbytes())
    ):
        return address
    return 0
