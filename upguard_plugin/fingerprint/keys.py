"""The constants of the fingerprint, version 1. Fixed for good: recorded runs depend on them.

    h(T) = sum over j of  A[j >> 11] * B[j & 2047] * w_j   mod P,   P = 2**61 - 1

w_j is the j-th little-endian 32-bit word of the tensor's bytes in row-major order, zero padded at
the end. A and B are residues in 1..P-1, drawn from one 64-bit key. Python integers and numpy only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import FINGERPRINT_PRIME, FINGERPRINT_VERSION

__all__ = ["FINGERPRINT_PRIME", "FINGERPRINT_VERSION"]

Words = npt.NDArray[np.uint64]

BLOCK_WORDS = 2048  # words that share one A: 8 KiB
BLOCK_BYTES = 4 * BLOCK_WORDS
MAX_BYTES = 1 << 63  # of a logical tensor: offsets are signed 64-bit numbers everywhere
PART_BYTES = 1 << 56  # a tensor made of parts (sparse, scaled) holds part k at k times this offset

MASK64 = (1 << 64) - 1
KEY = 0x5570477561726431
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the stride of splitmix64
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * MIX1) & MASK64
    z = ((z ^ (z >> 27)) * MIX2) & MASK64
    return z ^ (z >> 31)


def key61(z: int) -> int:
    """64 random bits as a residue in 1..P-1: a zero key would not see its words."""
    z >>= 3
    if z >= FINGERPRINT_PRIME - 1:
        z -= FINGERPRINT_PRIME - 1
    return z + 1


SEED_A = mix(KEY ^ 0xA5A5A5A5A5A5A5A5)
SEED_B = mix(KEY ^ 0x5A5A5A5A5A5A5A5A)
SEED_COLUMN_SIGN = mix(KEY ^ 0x3C3C3C3C3C3C3C3C)  # of the sketch
SEED_BLOCK_SIGN = mix(KEY ^ 0xC3C3C3C3C3C3C3C3)  # of the sketch


def key_a(block: int) -> int:
    """A[block]."""
    return key61(mix(SEED_A + (block + 1) * GOLDEN))


def keys_a(blocks: Words) -> Words:
    """A of many blocks at once; uint64 in, uint64 out."""
    z = np.uint64(SEED_A) + (blocks + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(3)
    last = np.uint64(FINGERPRINT_PRIME - 1)
    return np.where(z >= last, z - last, z) + np.uint64(1)


KEYS_B: Words = np.array(
    [key61(mix(SEED_B + (c + 1) * GOLDEN)) for c in range(BLOCK_WORDS)], np.uint64
)
KEYS_B.flags.writeable = False


def limbs(keys: Words) -> tuple[npt.NDArray[np.uint32], ...]:
    """Split 61-bit keys into 21 + 21 + 19 bits.

    A 32-bit word times 21 bits stays below 2**53: 2048 products add up in 64 bits without a carry.
    """
    low = np.uint64((1 << 21) - 1)
    parts = (keys & low, (keys >> np.uint64(21)) & low, keys >> np.uint64(42))
    return tuple(part.astype(np.uint32) for part in parts)
