"""Slots of CUDA tensors: where the kernels write, which streams wrote, one copy at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from upguard_plugin.fingerprint.elements import is_numeric, values_of
from upguard_plugin.fingerprint.keys import BLOCK_BYTES, FINGERPRINT_PRIME, KEYS_B, keys_a, limbs
from upguard_plugin.fingerprint.rows import Planned
from upguard_plugin.fingerprint.sketch import COLUMN_SIGNS
from upguard_plugin.fingerprint.sweeps import MAX_DIMS, Sweep
from upguard_plugin.fingerprint.triton_kernels import hash_blocks, hash_elements, measure_elements

CHUNK_SLOTS = 4096
TABLE_BLOCKS = 1 << 20  # A comes from a table up to 8 GiB, beyond it is computed
BLOCKS_PER_PROGRAM = 16  # of 8 KiB
ELEMENTS_PER_PROGRAM = 1024


class TritonSlots:
    """The slots of one CUDA device (or, under Triton's interpreter, of CPU tensors)."""

    note: str | None = None

    def __init__(self, device: torch.device, sketch_size: int) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._columns = 2 + sketch_size
        self._chunks: list[tuple[Tensor, Tensor]] = []  # words [n, 3] and measures
        self._slots: list[int] = []
        self._measured: list[bool] = []
        self._streams: list[torch.cuda.Stream] = []  # that wrote since the buffers were cleared
        self._keys_b = torch.from_numpy(KEYS_B.view(np.int64).copy()).to(device)
        self._column_signs = torch.from_numpy(COLUMN_SIGNS.copy()).to(device)
        self._values: dict[torch.dtype, Tensor] = {}
        self._table = torch.zeros((0, 4), dtype=torch.int32, device=device)

    def put(self, slot: int, planned: Sequence[Planned], measured: bool, size: int) -> None:
        at = len(self._slots)
        words, measures = self._row(at)
        self._slots.append(slot)
        self._measured.append(measured)
        self._join_stream()
        with torch.cuda.device(self._device) if self._on_cuda else nullcontext():
            for part, tensor, sweeps in planned:
                raw = _raw(tensor)
                has_numbers = measured and part.has_values and is_numeric(tensor.dtype)
                for sweep in sweeps:
                    self._hash(raw, sweep, part.offset, words, tensor.itemsize >= 8)
                    if has_numbers:
                        self._measure(tensor, sweep, part.offset, measures, size)

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
            kept = np.flatnonzero(self._measured)
            measures[np.array(self._slots)[kept]] = rows.cpu().numpy()[kept]
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

    def _hash(self, raw: Tensor, sweep: Sweep, offset: int, words: Tensor, with_sum: bool) -> None:
        start = offset + sweep.offset
        address = raw.data_ptr() + sweep.start
        if sweep.dims or start % 4 or address % 4 or sweep.run_bytes < 4:
            self._hash_elements(raw, sweep, start, words, with_sum)
            return
        whole = sweep.run_bytes // 4 * 4
        first = start // 4
        last_block = (start + whole - 1) // BLOCK_BYTES
        first_block = start // BLOCK_BYTES
        in_table = last_block < TABLE_BLOCKS
        if in_table:
            self._grow_table(last_block + 1)
        num_blocks = last_block - first_block + 1
        source = raw[sweep.start : sweep.start + whole].view(torch.int32)
        hash_blocks[(-(-num_blocks // BLOCKS_PER_PROGRAM),)](
            source,
            self._table,
            self._keys_b,
            words,
            first,
            whole // 4,
            first_block,
            num_blocks,
            BLOCKS=BLOCKS_PER_PROGRAM,
            IN_TABLE=in_table,
            WITH_SUM=with_sum,
            num_warps=8,
        )
        if whole < sweep.run_bytes:
            tail = Sweep(sweep.start + whole, 0, sweep.run_bytes - whole, ())
            self._hash_elements(raw, tail, start + whole, words, with_sum)

    def _hash_elements(
        self, raw: Tensor, sweep: Sweep, start: int, words: Tensor, with_sum: bool
    ) -> None:
        steps = [start, sweep.start, sweep.run_bytes, raw.data_ptr()]
        steps += [step for dim in sweep.dims for step in (dim.memory, dim.logical)]
        width = next(w for w in (4, 2, 1) if all(step % w == 0 for step in steps))
        unit = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
        usable = raw.numel() // width * width
        total = sweep.run_bytes // width * _num_runs(sweep)
        hash_elements[(-(-total // ELEMENTS_PER_PROGRAM),)](
            raw[:usable].view(unit),
            self._keys_b,
            words,
            total,
            start // width,
            sweep.start // width,
            sweep.run_bytes // width,
            *_dim_arguments(sweep, width),
            WIDTH=width,
            ELEMENTS=ELEMENTS_PER_PROGRAM,
            WITH_SUM=with_sum,
        )

    def _measure(
        self, tensor: Tensor, sweep: Sweep, offset: int, measures: Tensor, size: int
    ) -> None:
        numbers, dtype = _numbers(tensor), tensor.dtype
        width = numbers.itemsize
        values = self._values_of(dtype)
        total = sweep.run_bytes // width * _num_runs(sweep)
        measure_elements[(-(-total // ELEMENTS_PER_PROGRAM),)](
            numbers,
            numbers if values is None else values,
            self._column_signs,
            measures,
            total,
            (offset + sweep.offset) // width,
            sweep.start // width,
            sweep.run_bytes // width,
            *_dim_arguments(sweep, width),
            BY_TABLE=values is not None,
            SIZE=size,
            ELEMENTS=ELEMENTS_PER_PROGRAM,
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
