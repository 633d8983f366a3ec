"""Slots of CUDA tensors: where the kernels write, which streams wrote, one copy at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from upguard_plugin.fingerprint.elements import is_numeric, values_of
from upguard_plugin.fingerprint.keys import BLOCK_BYTES, FINGERPRINT_PRIME, KEYS_B, keys_a, limbs
from upguard_plugin.fingerprint.parts import data_ptr
from upguard_plugin.fingerprint.rows import Planned
from upguard_plugin.fingerprint.sketch import COLUMN_SIGNS
from upguard_plugin.fingerprint.sweeps import MAX_DIMS, Sweep
from upguard_plugin.fingerprint.triton_kernels import hash_blocks, hash_elements, hash_small

CHUNK_SLOTS = 4096
TABLE_BLOCKS = 1 << 20  # A comes from a table up to 8 GiB, beyond it is computed
BLOCKS_PER_PROGRAM = 16  # of 8 KiB
ELEMENTS_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class _Job:
    """One dense part: what the kernels read, and where they write."""

    raw: Tensor  # its bytes, [N] uint8
    words: Tensor  # the slot's hashes
    with_sum: bool
    numbers: Tensor | None  # the same memory as numbers; None: not measured
    measuring: dict[str, Any]  # what both kernels want to know for it


class TritonSlots:
    """The slots of one CUDA device (or, under Triton's interpreter, of CPU tensors)."""

    note: str | None = None

    def __init__(self, device: torch.device, sketch_size: int) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._columns = 2 + sketch_size
        self._chunks: list[tuple[Tensor, Tensor]] = []  # words [n, 3] and measures
        self._slots: list[int] = []
        self._measured: list[int] = []  # columns of measures of each slot
        self._streams: list[torch.cuda.Stream] = []  # that wrote since the buffers were cleared
        self._keys_b = torch.from_numpy(KEYS_B.view(np.int64).copy()).to(device)
        self._column_signs = torch.from_numpy(COLUMN_SIGNS.copy()).to(device)
        self._values: dict[torch.dtype, Tensor] = {}
        self._table = torch.zeros((0, 4), dtype=torch.int32, device=device)

    def put(self, slot: int, planned: Sequence[Planned], measured: bool, size: int) -> None:
        words, measures = self._row(len(self._slots))
        self._slots.append(slot)
        self._measured.append(2 + size if measured else 0)
        self._join_stream()
        with torch.cuda.device(self._device) if self._on_cuda else nullcontext():
            for part, tensor, sweeps in planned:
                has_numbers = measured and part.has_values and is_numeric(tensor.dtype)
                job = self._job(tensor, words, measures if has_numbers else None, size)
                for sweep in sweeps:
                    self._hash(job, sweep, part.offset + sweep.offset)

    def put_many(self, slots: Sequence[int], tensors: Sequence[Tensor]) -> None:
        rows = []
        for slot, tensor in zip(slots, tensors, strict=True):
            words, _ = self._row(len(self._slots))
            self._slots.append(slot)
            self._measured.append(0)
            num_words = tensor.nbytes // 4
            rows.append((data_ptr(tensor), num_words, data_ptr(words), tensor.itemsize >= 8))
        self._join_stream()
        table = torch.tensor(rows, dtype=torch.int64)
        if self._on_cuda:
            table = table.pin_memory().to(self._device, non_blocking=True)
        with torch.cuda.device(self._device) if self._on_cuda else nullcontext():
            hash_small[(len(rows),)](table, self._keys_b, num_warps=8)

    def take_into(self, pairs: npt.NDArray, measures: npt.NDArray) -> None:
        count = len(self._slots)
        if not count:
            return
        if self._on_cuda:
            for stream in self._streams:
                torch.cuda.current_stream(self._device).wait_stream(stream)
        num_chunks = -(-count // CHUNK_SLOTS)
        words = torch.cat([chunk[0] for chunk in self._chunks[:num_chunks]])[:count].cpu().numpy()
        low, high, s = (words[:, k].astype(object) for k in range(3))
        pairs[self._slots, 0] = ((low + high * (1 << 32)) % FINGERPRINT_PRIME).astype(np.uint64)
        pairs[self._slots, 1] = (s % (1 << 64)).astype(np.uint64)
        if any(self._measured):
            rows = torch.cat([chunk[1] for chunk in self._chunks[:num_chunks]])[:count]
            host, slots = rows.cpu().numpy(), np.array(self._slots)
            for columns in (2, self._columns):
                kept = np.flatnonzero(np.array(self._measured) >= columns)
                measures[slots[kept], :columns] = host[kept, :columns]
        self.forget(0)

    def forget(self, first: int) -> None:
        kept = sum(slot < first for slot in self._slots)
        if kept == len(self._slots):
            return
        del self._slots[kept:], self._measured[kept:]
        for number, (words, measures) in enumerate(self._chunks):
            start = max(0, kept - number * CHUNK_SLOTS)
            words[start:].zero_()
            measures[start:].zero_()
        self._streams = []

    def _row(self, at: int) -> tuple[Tensor, Tensor]:
        """The memory of one slot; a new chunk where the last one is full."""
        number, row = divmod(at, CHUNK_SLOTS)
        if number == len(self._chunks):
            zeros = torch.zeros((CHUNK_SLOTS, 3), dtype=torch.int64, device=self._device)
            shape = (CHUNK_SLOTS, self._columns)
            measures = torch.zeros(shape, dtype=torch.float64, device=self._device)
            self._chunks.append((zeros, measures))
            self._streams = []
        words, measures = self._chunks[number]
        return words[row], measures[row]

    def _join_stream(self) -> None:
        """Let the current stream begin after the buffers were cleared, wherever that was."""
        if not self._on_cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._streams:
            for other in self._streams[:1] or [torch.cuda.default_stream(self._device)]:
                stream.wait_stream(other)
            self._streams.append(stream)

    def _job(self, tensor: Tensor, words: Tensor, measures: Tensor | None, size: int) -> _Job:
        """The work on one tensor; measures: the slot's row of them, None if not asked for."""
        measured = measures is not None
        values = self._values_of(tensor.dtype) if measured else None
        measuring = {
            "values": values,
            "column_signs": self._column_signs,
            "measures": measures,
            "MEASURED": measured,
            "BY_TABLE": values is not None,
            "SIZE": size if measured else 0,
        }
        numbers = _numbers(tensor) if measured else None
        return _Job(_raw(tensor), words, tensor.itemsize >= 8, numbers, measuring)

    def _hash(self, job: _Job, sweep: Sweep, start: int) -> None:
        """One sweep from the logical byte `start` on: whole words, then the bytes that are left."""
        address = job.raw.data_ptr() + sweep.start
        if sweep.dims or start % 4 or address % 4 or sweep.run_bytes < 4:
            self._hash_elements(job, sweep, start)
            return
        whole = sweep.run_bytes // 4 * 4
        self._hash_blocks(job, sweep.start, whole, start)
        if whole < sweep.run_bytes:
            tail = Sweep(sweep.start + whole, 0, sweep.run_bytes - whole, ())
            self._hash_elements(job, tail, start + whole)

    def _hash_blocks(self, job: _Job, source: int, num_bytes: int, start: int) -> None:
        last_block = (start + num_bytes - 1) // BLOCK_BYTES
        first_block = start // BLOCK_BYTES
        in_table = last_block < TABLE_BLOCKS
        if in_table:
            self._grow_table(last_block + 1)
        num_blocks = last_block - first_block + 1
        numbers: tuple[Tensor | None, int, int, int] = (None, 0, 0, 1)
        if job.numbers is not None:
            width = job.numbers.itemsize
            numbers = (job.numbers[source // width :], start // width, num_bytes // width, width)
        hash_blocks[(-(-num_blocks // BLOCKS_PER_PROGRAM),)](
            job.raw[source : source + num_bytes].view(torch.int32),
            self._table,
            self._keys_b,
            job.words,
            start // 4,
            num_bytes // 4,
            first_block,
            num_blocks,
            *numbers,
            BLOCKS=BLOCKS_PER_PROGRAM,
            IN_TABLE=in_table,
            WITH_SUM=job.with_sum,
            num_warps=8,
            **job.measuring,
        )

    def _hash_elements(self, job: _Job, sweep: Sweep, start: int) -> None:
        elements = _units(job.raw, sweep, start) if job.numbers is None else job.numbers
        width = elements.itemsize
        total = sweep.run_bytes // width * _num_runs(sweep)
        hash_elements[(-(-total // ELEMENTS_PER_PROGRAM),)](
            elements,
            self._keys_b,
            job.words,
            total,
            start // width,
            sweep.start // width,
            sweep.run_bytes // width,
            *_dim_arguments(sweep, width),
            WIDTH=width,
            ELEMENTS=ELEMENTS_PER_PROGRAM,
            WITH_SUM=job.with_sum,
            **job.measuring,
        )

    def _values_of(self, dtype: torch.dtype) -> Tensor | None:
        """The numbers of all bytes of a dtype that Triton may not know, on the device; or None."""
        if dtype.itemsize != 1 or not dtype.is_floating_point:
            return None
        if dtype not in self._values:
            self._values[dtype] = torch.from_numpy(values_of(dtype)).to(self._device)
        return self._values[dtype]

    def _grow_table(self, num_blocks: int) -> None:
        """Have the limbs of A for blocks 0..num_blocks-1 on the device, [blocks, 4] int32."""
        if num_blocks <= len(self._table):
            return
        size = max(1024, 1 << (num_blocks - 1).bit_length())
        table = np.zeros((size, 4), np.int32)
        for k, limb in enumerate(limbs(keys_a(np.arange(size, dtype=np.uint64)))):
            table[:, k] = limb.view(np.int32)
        self._table = torch.from_numpy(table).to(self._device)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes from the tensor's first element to its last, [N] uint8; no copy."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    reach = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.as_strided((reach,), (1,)).view(torch.uint8)


def _numbers(tensor: Tensor) -> Tensor:
    """As `_raw`, as numbers that Triton can read: complex ones as pairs, bytes as uint8."""
    raw = _raw(tensor)
    if tensor.itemsize == 1 and tensor.dtype != torch.int8:
        return raw
    real = {
        torch.complex128: torch.float64,
        torch.complex64: torch.float32,
        torch.complex32: torch.float16,
    }
    return raw.view(real.get(tensor.dtype, tensor.dtype))


def _units(raw: Tensor, sweep: Sweep, start: int) -> Tensor:
    """Memory in the widest units that every run of a sweep consists of."""
    steps = [start, sweep.start, sweep.run_bytes, raw.data_ptr()]
    steps += [step for dim in sweep.dims for step in (dim.memory, dim.logical)]
    width = next(w for w in (8, 4, 2, 1) if all(step % w == 0 for step in steps))
    unit = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    return raw[: raw.numel() // width * width].view(unit)


def _num_runs(sweep: Sweep) -> int:
    count = 1
    for dim in sweep.dims:
        count *= dim.size
    return count


def _dim_arguments(sweep: Sweep, width: int) -> list[int]:
    """(size, memory step, logical step) for MAX_DIMS loops, inner first, steps in elements."""
    arguments: list[int] = []
    for dim in reversed(sweep.dims):
        arguments += [dim.size, dim.memory // width, dim.logical // width]
    return arguments + [1, 0, 0] * (MAX_DIMS - len(sweep.dims))
