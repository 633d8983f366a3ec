# mypy: ignore-errors
"""The CPU kernel with measures: fingerprint, non-finite count, largest magnitude and sketch.

One pass over memory: each block is hashed and then measured while it is in the first-level cache.
Slower than `cpu.py`, so a separate kernel. Not for mypy: the bodies are numba's language.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba import uint64 as u64

from upguard_plugin.fingerprint import keys, sketch
from upguard_plugin.fingerprint.cache import compile_kernel
from upguard_plugin.fingerprint.cpu import (
    MEASURE_COLUMN,
    SWEEP_COLUMNS,
    count_runs,
    locate_run,
)
from upguard_plugin.fingerprint.residues import add, mix, pointer
from upguard_plugin.fingerprint.stretches import hash_stretch

Floats = Any  # memory seen as float64
Row = Any  # memory seen as int64

# How the bytes of an element are read; the numbers stand in the table of sweeps.
NOT_MEASURED = 0
FLOAT64, FLOAT32, BFLOAT16 = 1, 2, 3
TABLE8, TABLE16 = 4, 5  # by a float32 table of all bit patterns, whose address is in the row
INT8, INT16, INT32, INT64 = 6, 7, 8, 9
UINT8, UINT16, UINT32, UINT64 = 10, 11, 12, 13
SIZES = np.array([1, 8, 4, 2, 1, 2, 1, 2, 4, 8, 1, 2, 4, 8])

BLOCK = sketch.SKETCH_BLOCK
BLOCK_BYTES = keys.BLOCK_BYTES
MAGNITUDE_BITS = 0x7FFFFFFFFFFFFFFF
INFINITY_BITS = 0x7FF0000000000000
SCRATCH_BYTES = 8 * BLOCK + 4 * BLOCK + 8 * max(sketch.SIZES)
SEED_BLOCK_SIGN = np.uint64(keys.SEED_BLOCK_SIGN)
GOLDEN = np.uint64(keys.GOLDEN)
COLUMN_SIGNS = np.array(sketch.COLUMN_SIGNS)


@njit
def _widen(address: int, count: int, code: int, table: int, scratch: int) -> Floats:
    """Read `count` <= BLOCK elements as float64 into scratch memory."""
    out = carray(pointer(u64(scratch), np.float64), (count,))
    at = u64(address)
    if code == FLOAT64:
        out[:] = carray(pointer(at, np.float64), (count,))
    elif code == FLOAT32:
        out[:] = carray(pointer(at, np.float32), (count,))
    elif code == BFLOAT16:
        bits = carray(pointer(u64(scratch + 8 * BLOCK), np.uint32), (count,))
        halves = carray(pointer(at, np.uint16), (count,))
        for k in range(count):
            bits[k] = np.uint32(halves[k]) << np.uint32(16)
        out[:] = carray(pointer(u64(scratch + 8 * BLOCK), np.float32), (count,))
    elif code == TABLE8:
        _look_up(carray(pointer(at, np.uint8), (count,)), table, out)
    elif code == TABLE16:
        _look_up(carray(pointer(at, np.uint16), (count,)), table, out)
    elif code == INT8:
        out[:] = carray(pointer(at, np.int8), (count,))
    elif code == INT16:
        out[:] = carray(pointer(at, np.int16), (count,))
    elif code == INT32:
        out[:] = carray(pointer(at, np.int32), (count,))
    elif code == INT64:
        out[:] = carray(pointer(at, np.int64), (count,))
    elif code == UINT8:
        out[:] = carray(pointer(at, np.uint8), (count,))
    elif code == UINT16:
        out[:] = carray(pointer(at, np.uint16), (count,))
    elif code == UINT32:
        out[:] = carray(pointer(at, np.uint32), (count,))
    else:
        out[:] = carray(pointer(at, np.uint64), (count,))
    return out


@njit
def _look_up(bits: Any, table: int, out: Floats) -> None:
    values = carray(pointer(u64(table), np.float32), (65536,))
    for k in range(bits.shape[0]):
        out[k] = values[bits[k]]


@njit
def _clear_nonfinite(bits: Any) -> tuple[int, int]:
    """Set non-finite elements to 0; returns their number and the bits of the largest magnitude.

    On float64 bits as integers, because then the loop becomes vector code: without their sign,
    floats are in the order of their bits, and non-finite ones are the last.
    """
    count = largest = 0
    for k in range(bits.shape[0]):
        magnitude = bits[k] & MAGNITUDE_BITS
        nonfinite = magnitude >= INFINITY_BITS
        count += nonfinite
        bits[k] = 0 if nonfinite else bits[k]
        largest = max(largest, 0 if nonfinite else magnitude)
    return count, largest


@njit
def _add_to_sketch(values: Floats, first: int, lanes: Floats, buckets: Floats) -> None:
    """Add a part of one block, whose first element has the logical number `first`."""
    size = lanes.shape[0]
    block, column = first >> 11, first & (BLOCK - 1)
    lanes[:] = 0.0
    k = 0
    while k < values.shape[0]:
        lane = (column + k) & (size - 1)
        count = min(size - lane, values.shape[0] - k)
        # Views first: an index that may be negative would keep the loop from becoming vector code.
        into, part = lanes[lane : lane + count], values[k : k + count]
        signs = COLUMN_SIGNS[column + k : column + k + count]
        for j in range(count):
            into[j] += part[j] * signs[j]
        k += count
    rotation = mix(u64(SEED_BLOCK_SIGN) ^ (u64(block) * u64(GOLDEN))) >> u64(20)
    word = u64(0)
    for lane in range(size):
        if lane & 63 == 0:
            word = mix(u64(SEED_BLOCK_SIGN) + u64(4 * block + (lane >> 6) + 1) * u64(GOLDEN))
        bucket = (lane + int(rotation & u64(size - 1))) & (size - 1)
        negative = (word >> u64(lane & 63)) & u64(1)
        buckets[bucket] += -lanes[lane] if negative else lanes[lane]


@njit
def _measure(
    address: int, count: int, first: int, row: Row, measured: Floats, scratch: int
) -> None:
    """Measure a contiguous run of elements, block by block of the logical tensor."""
    code, table, size = row[MEASURE_COLUMN], row[MEASURE_COLUMN + 1], measured.shape[0] - 2
    lanes = carray(pointer(u64(scratch + 12 * BLOCK), np.float64), (size,))
    largest_cell = carray(pointer(u64(measured.ctypes.data + 8), np.int64), (1,))
    done = 0
    while done < count:
        n = min(BLOCK - ((first + done) & (BLOCK - 1)), count - done)
        values = _widen(address + done * SIZES[code], n, code, table, scratch)
        nonfinite, largest = _clear_nonfinite(carray(pointer(u64(scratch), np.int64), (n,)))
        measured[0] += nonfinite
        largest_cell[0] = max(largest_cell[0], largest)
        if size:
            _add_to_sketch(values, first + done, lanes, measured[2:])
        done += n


@compile_kernel(nogil=True)
def measure_sweeps(
    table: int, num_sweeps: int, out: int, measures: int, columns: int, size: int, scratch: int
) -> None:
    """As `hash_sweeps`, and each sweep adds to row `slot` of the measures too.

    measures: address of float64 rows of `columns`: non-finite count, largest finite magnitude, then
    the `size` buckets of the sketch. The table, without tiles, has from MEASURE_COLUMN on the way
    to read an element and the address of its table. scratch: address of SCRATCH_BYTES bytes.
    """
    rows = carray(pointer(u64(table), np.int64), (num_sweeps, SWEEP_COLUMNS))
    for t in range(num_sweeps):
        row = rows[t]
        width = SIZES[row[MEASURE_COLUMN]]
        target = carray(pointer(u64(out + 16 * row[0]), np.uint64), (2,))
        measured = carray(pointer(u64(measures + 8 * columns * row[0]), np.float64), (2 + size,))
        for run in range(count_runs(row)):
            address, offset = locate_run(row, run)
            done = 0
            while done < row[3]:
                n = min(BLOCK_BYTES - ((offset + done) & (BLOCK_BYTES - 1)), row[3] - done)
                h, s = hash_stretch(address + done, n, offset + done, row[4])
                target[0] = add(target[0], h)
                target[1] += s
                if row[MEASURE_COLUMN] != NOT_MEASURED:
                    first = (offset + done) // width
                    _measure(address + done, n // width, first, row, measured, scratch)
                done += n
