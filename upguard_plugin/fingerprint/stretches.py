# mypy: ignore-errors
"""Runs of bytes at memory addresses, hashed at their logical offsets: what all CPU kernels share.

In:  addresses as integers. Out: (h, s). Nothing is allocated.
Not for mypy: the bodies are numba's language, in which an integer's width matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba import uint64 as u64

from upguard_plugin.fingerprint import keys
from upguard_plugin.fingerprint.residues import add, key_a, multiply, pointer
from upguard_plugin.fingerprint.vector import BLOCKS_AT_ONCE, KEY_ROWS, LANES, join, vector_sums

Word = Any  # uint64 in a register
Words = Any  # memory seen as uint64
Bytes = Any  # memory seen as uint8

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
