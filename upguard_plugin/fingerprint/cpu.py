# mypy: ignore-errors
"""The CPU kernels: runs of bytes at memory addresses, hashed at their logical offsets.

In:  addresses as integers. Out: (h, s) written as two uint64 at an address. Nothing is allocated.
Not for mypy: the bodies are numba's language, in which an integer's width matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba import uint64 as u64

from upguard_plugin.fingerprint import keys
from upguard_plugin.fingerprint.cache import compile_kernel
from upguard_plugin.fingerprint.residues import add, key_a, multiply, pointer
from upguard_plugin.fingerprint.vector import BLOCKS_AT_ONCE, KEY_ROWS, LANES, join, vector_sums

Word = Any  # uint64 in a register
Words = Any  # memory seen as uint64
Bytes = Any  # memory seen as uint8
Row = Any  # memory seen as int64

MAX_DIMS = 4  # outer dims of one sweep; see `sweeps.py`
SWEEP_COLUMNS = 8 + 3 * MAX_DIMS  # the last two are for `measure.py`

KEYS_B = np.array(keys.KEYS_B)
PAIRS_PER_BLOCK = keys.BLOCK_WORDS // 2

_one_block_sums = vector_sums(1)
_many_block_sums = vector_sums(BLOCKS_AT_ONCE)


@njit
def _hash_in_block(pairs: Words, first: int) -> tuple[Word, Word]:
    """Pairs that lie in one block, from its pair `first` on: hash before its A, and plain sum."""
    whole = pairs.shape[0] & ~(LANES - 1)
    s, sums = _one_block_sums(
        u64(pairs.ctypes.data), u64(KEY_ROWS.ctypes.data + 8 * first), u64(8 * whole)
    )
    h = join(sums[0])
    for k in range(whole, pairs.shape[0]):
        x, y = pairs[k] & u64(0xFFFFFFFF), pairs[k] >> u64(32)
        h = add(h, multiply(x, u64(KEYS_B[2 * (first + k)])))
        h = add(h, multiply(y, u64(KEYS_B[2 * (first + k) + 1])))
        s += pairs[k]
    return h, s


@njit
def _hash_bytes(data: Bytes, offset: int) -> Word:  # the few before and after whole pairs
    h = u64(0)
    k = 0
    while k < data.shape[0]:
        position = u64(offset) + u64(k)
        word = position >> u64(2)
        value = u64(0)
        while k < data.shape[0] and (u64(offset) + u64(k)) >> u64(2) == word:
            value |= u64(data[k]) << (u64(8) * ((u64(offset) + u64(k)) & u64(3)))
            k += 1
        keyed = multiply(value, u64(KEYS_B[word & u64(keys.BLOCK_WORDS - 1)]))
        h = add(h, multiply(keyed, key_a(word >> u64(11))))
    return h


@njit
def hash_stretch(address: int, num_bytes: int, offset: int, with_sum: int) -> tuple[Word, Word]:
    """A contiguous run at `address`, at byte `offset` of the logical tensor."""
    h = s = u64(0)
    data = carray(pointer(u64(address), np.uint8), (num_bytes,))
    head = min((-offset) & 7, num_bytes)  # up to a whole pair of words
    if head:
        h = _hash_bytes(data[:head], offset)
    num_pairs = (num_bytes - head) >> 3
    pairs = carray(pointer(u64(address + head), np.uint64), (num_pairs,))
    first = (offset + head) >> 3
    i = 0
    while i < num_pairs:
        c = (first + i) & (PAIRS_PER_BLOCK - 1)
        block = u64((first + i) >> 10)
        if c == 0 and num_pairs - i >= BLOCKS_AT_ONCE * PAIRS_PER_BLOCK:
            many_s, sums = _many_block_sums(
                u64(pairs.ctypes.data + 8 * i), u64(KEY_ROWS.ctypes.data), u64(8 * PAIRS_PER_BLOCK)
            )
            s += many_s
            for k in range(BLOCKS_AT_ONCE):
                h = add(h, multiply(join(sums[k]), key_a(block + u64(k))))
            i += BLOCKS_AT_ONCE * PAIRS_PER_BLOCK
            continue
        n = min(PAIRS_PER_BLOCK - c, num_pairs - i)
        block_h, block_s = _hash_in_block(pairs[i : i + n], c)
        s += block_s
        h = add(h, multiply(block_h, key_a(block)))
        i += n
    done = head + 8 * num_pairs
    if done < num_bytes:
        h = add(h, _hash_bytes(data[done:], offset + done))
    return h, s if with_sum else u64(0)


@njit
def count_runs(row: Row) -> int:
    """How many contiguous runs a sweep has."""
    num_runs = 1
    for d in range(row[5]):
        num_runs *= row[6 + 3 * d]
    return num_runs


@njit
def locate_run(row: Row, run: int) -> tuple[int, int]:
    """Address and logical offset of run number `run` of a sweep."""
    address, offset = row[1], row[2]
    for d in range(row[5] - 1, -1, -1):
        size = row[6 + 3 * d]
        k = run % size
        run //= size
        address += k * row[7 + 3 * d]
        offset += k * row[8 + 3 * d]
    return address, offset


@njit
def _hash_rows(table: int, num_sweeps: int, out: int) -> None:
    rows = carray(pointer(u64(table), np.int64), (num_sweeps, SWEEP_COLUMNS))
    for t in range(num_sweeps):
        row = rows[t]
        target = carray(pointer(u64(out + 16 * row[0]), np.uint64), (2,))
        for run in range(count_runs(row)):
            address, offset = locate_run(row, run)
            h, s = hash_stretch(address, row[3], offset, row[4])
            target[0] = add(target[0], h)
            target[1] += s


@compile_kernel(nogil=False)
def hash_run(address: int, num_bytes: int, offset: int, with_sum: int, out: int) -> None:
    """Hash a contiguous run; (h, s) to the two uint64 at `out`. All arguments are integers."""
    target = carray(pointer(u64(out), np.uint64), (2,))
    target[0], target[1] = hash_stretch(address, num_bytes, offset, with_sum)


@compile_kernel(nogil=True)
def hash_long_run(address: int, num_bytes: int, offset: int, with_sum: int, out: int) -> None:
    """As `hash_run`; other Python threads may run meanwhile."""
    target = carray(pointer(u64(out), np.uint64), (2,))
    target[0], target[1] = hash_stretch(address, num_bytes, offset, with_sum)


@compile_kernel(nogil=False)
def hash_sweeps(table: int, num_sweeps: int, out: int) -> None:
    """Hash many sweeps; each adds its (h, s) to row `slot` of the uint64 pairs at `out`.

    table: address of int64 rows [num_sweeps, SWEEP_COLUMNS]: slot, address, offset, run bytes,
    with_sum, number of dims, then for each dim (size, memory step, logical step), outer first.
    Offsets and steps count bytes.
    """
    _hash_rows(table, num_sweeps, out)


@compile_kernel(nogil=True)
def hash_many_sweeps(table: int, num_sweeps: int, out: int) -> None:
    """As `hash_sweeps`; other Python threads may run meanwhile."""
    _hash_rows(table, num_sweeps, out)
