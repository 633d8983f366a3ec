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

from upguard_plugin.fingerprint.cpu import SWEEP_COLUMNS, hash_run, hash_sweeps
from upguard_plugin.fingerprint.keys import FINGERPRINT_PRIME, MASK64
from upguard_plugin.fingerprint.parts import PLAIN_TYPES, Part, dense_parts
from upguard_plugin.fingerprint.sweeps import Sweep, plan_sweeps
from upguard_plugin.fingerprint.threads import PARALLEL_BYTES, hash_run_parallel
from upguard_plugin.records import Placement

Words = npt.NDArray[np.uint64]

FIRST_SLOTS = 1024
MAX_PLANS = 4096  # sweeps of placed or strided tensors, kept while the same shapes return


@dataclass(frozen=True, slots=True)
class Hashes:
    """What a queue took, one row per slot. Optional columns are None where not asked for."""

    h: Words
    s: Words
    nonfinite: npt.NDArray[np.int64] | None = None
    max_abs: npt.NDArray[np.float64] | None = None
    sketch: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.h)


class FingerprintQueue:
    """Hashes tensors in program order; a slot is the number of a tensor since the last `take`."""

    def __init__(self) -> None:
        self._pairs = np.zeros((FIRST_SLOTS, 2), np.uint64)  # h and s of each slot
        self._address = self._pairs.ctypes.data
        self._slots = 0
        self._plans: dict[tuple, tuple[Placement | None, tuple[Sweep, ...] | None]] = {}

    def __len__(self) -> int:
        return self._slots

    def put(self, tensor: Tensor, placement: Placement | None = None) -> int:
        """Hash one tensor and return its slot. Never waits for a device.

        placement: its part of a logical tensor; None: hashed at offset 0, as a whole.
        Raises PlacementError if the placement does not fit, UnsupportedTensorError if the tensor
        has no plain bytes; the slot is not used then.
        """
        if (
            placement is None
            and type(tensor) in PLAIN_TYPES
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and not tensor.is_quantized
        ):
            slot = self._next_slot()
            num_bytes = tensor.nbytes
            hasher = hash_run if num_bytes < PARALLEL_BYTES else hash_run_parallel
            out = self._address + 16 * slot
            hasher(tensor.data_ptr(), num_bytes, 0, int(tensor.itemsize >= 8), out)
            return slot
        return self._put_parts(dense_parts(tensor, placement))

    def put_many(
        self, tensors: Sequence[Tensor], placements: Sequence[Placement | None] | None = None
    ) -> range:
        """Hash many tensors in one kernel call; returns their slots. As `put` in all else."""
        first = self._slots
        rows: list[tuple[int, ...]] = []
        self._reserve(len(tensors))
        try:
            for i, tensor in enumerate(tensors):
                if (
                    (placements is None or placements[i] is None)
                    and type(tensor) in PLAIN_TYPES
                    and tensor.is_cpu
                    and tensor.nbytes < PARALLEL_BYTES
                    and tensor.layout is torch.strided
                    and tensor.is_contiguous()
                    and not tensor.is_neg()
                    and not tensor.is_conj()
                    and not tensor.is_quantized
                ):
                    rows.append(
                        (self._slots, tensor.data_ptr(), tensor.nbytes, tensor.itemsize >= 8)
                    )
                    self._slots += 1
                else:
                    self.put(tensor, placements[i] if placements is not None else None)
        except BaseException:
            self._forget(first)
            raise
        if rows:
            table = np.zeros((len(rows), SWEEP_COLUMNS), np.int64)
            table[:, [0, 1, 3, 4]] = np.array(rows, np.int64)
            hash_sweeps(table.ctypes.data, len(rows), self._address)
        return range(first, self._slots)

    def put_bytes(self, data: bytes | bytearray | memoryview) -> int:
        """Hash raw bytes, as a uint8 tensor of the same bytes would be hashed."""
        array = np.frombuffer(data, np.uint8)
        slot = self._next_slot()
        hash_run(array.ctypes.data, array.nbytes, 0, 0, self._address + 16 * slot)
        return slot

    def put_words(self, h: int, s: int = 0) -> int:
        """Take a slot for a value that was hashed elsewhere."""
        slot = self._next_slot()
        self._pairs[slot, 0] = h % FINGERPRINT_PRIME
        self._pairs[slot, 1] = s & MASK64
        return slot

    def take(self) -> Hashes:
        """The hashes of all slots since the last call, in order; the queue is empty afterwards.

        Waits for the devices whose tensors were put, with one copy for each.
        """
        taken = self._pairs[: self._slots].copy()
        self._forget(0)
        return Hashes(taken[:, 0].copy(), taken[:, 1].copy())

    def _put_parts(self, parts: Sequence[Part]) -> int:
        planned = [(part, *self._plan(part)) for part in parts]
        rows: list[list[int]] = []
        slot = self._slots
        for part, tensor, sweeps in planned:
            with_sum = int(tensor.itemsize >= 8)
            for sweep in sweeps:
                row = [slot, tensor.data_ptr() + sweep.start, part.offset + sweep.offset]
                row += [sweep.run_bytes, with_sum, len(sweep.dims)]
                for dim in sweep.dims:
                    row += [dim.size, dim.memory, dim.logical]
                rows.append(row + [0] * (SWEEP_COLUMNS - len(row)))
        self._next_slot()
        if rows:
            table = np.array(rows, np.int64)
            hash_sweeps(table.ctypes.data, len(rows), self._address)
        return slot

    def _plan(self, part: Part) -> tuple[Tensor, tuple[Sweep, ...]]:
        tensor, placement = part.tensor, part.placement
        key = (id(placement), tensor.shape, tensor.stride(), tensor.itemsize)
        found = self._plans.get(key)
        if found is None:
            sweeps = plan_sweeps(tensor.shape, tensor.stride(), tensor.itemsize, placement)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            # The placement is kept with its plan: its id stays its own as long as the plan is here.
            found = self._plans[key] = (placement, sweeps)
        if found[1] is not None:
            return tensor, found[1]
        return self._plan(Part(tensor.contiguous(), part.offset, placement))

    def _next_slot(self) -> int:
        self._reserve(1)
        self._slots += 1
        return self._slots - 1

    def _reserve(self, count: int) -> None:
        if self._slots + count > len(self._pairs):
            grown = np.zeros((max(2 * len(self._pairs), self._slots + count), 2), np.uint64)
            grown[: self._slots] = self._pairs[: self._slots]
            self._pairs, self._address = grown, grown.ctypes.data

    def _forget(self, first: int) -> None:
        self._pairs[first : self._slots] = 0
        self._slots = first
