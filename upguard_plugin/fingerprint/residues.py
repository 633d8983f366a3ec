# mypy: ignore-errors
"""Arithmetic modulo 2**61 - 1, for the compiled CPU kernels.

Not for mypy: the bodies are numba's language, in which an integer's width matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba import uint64 as u64
from numba.extending import intrinsic

from upguard_plugin.fingerprint import keys

Word = Any  # uint64 in a register
Words = Any  # a tuple of them

PRIME = np.uint64(keys.FINGERPRINT_PRIME)
SEED_A = np.uint64(keys.SEED_A)
GOLDEN = np.uint64(keys.GOLDEN)
MIX1, MIX2 = np.uint64(keys.MIX1), np.uint64(keys.MIX2)


@intrinsic
def pointer(typing_context: Any, address: Any, dtype: Any) -> Any:
    """An integer address as a pointer, for `carray`."""
    typed = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(typed))

    return typed(types.uint64, dtype), generate


@njit(inline="always")
def fold(x: Word) -> Word:  # partial reduction: below 2**61 + 8
    return (x & u64(PRIME)) + (x >> u64(61))


@njit(inline="always")
def add(x: Word, y: Word) -> Word:  # of two residues
    x += y
    return x - u64(PRIME) if x >= u64(PRIME) else x


@njit(inline="always")
def multiply(x: Word, y: Word) -> Word:  # of two residues, by 32-bit halves
    x0 = x & u64(0xFFFFFFFF)
    x1 = x >> u64(32)
    y0 = y & u64(0xFFFFFFFF)
    y1 = y >> u64(32)
    low, middle, high = x0 * y0, x1 * y0 + x0 * y1, x1 * y1
    r = fold(low) + ((middle & u64(0x1FFFFFFF)) << u64(32)) + (middle >> u64(29))
    r = fold(r + (high << u64(3)))
    return r - u64(PRIME) if r >= u64(PRIME) else r


@njit(inline="always")
def join_limbs(sums: Words) -> Word:  # sums[0] + sums[1] * 2**21 + sums[2] * 2**42 mod P
    a0, a1, a2 = sums
    a1, a2 = fold(fold(a1)), fold(fold(a2))
    r = fold(fold(a0) + ((a1 & u64((1 << 40) - 1)) << u64(21)) + (a1 >> u64(40)))
    r = fold(r + ((a2 & u64((1 << 19) - 1)) << u64(42)) + (a2 >> u64(19)))
    return r - u64(PRIME) if r >= u64(PRIME) else r


@njit(inline="always")
def join_fused(sums: Words) -> Word:  # sums[0] + sums[1] * 2**52 mod P; sums[1] below 2**61
    low, high = sums
    r = fold(fold(low) + ((high & u64((1 << 9) - 1)) << u64(52)) + (high >> u64(9)))
    return r - u64(PRIME) if r >= u64(PRIME) else r


@njit(inline="always")
def mix(z: Word) -> Word:
    z = (z ^ (z >> u64(30))) * u64(MIX1)
    z = (z ^ (z >> u64(27))) * u64(MIX2)
    return z ^ (z >> u64(31))


@njit(inline="always")
def key_a(block: Word) -> Word:
    z = mix(u64(SEED_A) + (block + u64(1)) * u64(GOLDEN)) >> u64(3)
    if z >= u64(PRIME) - u64(1):
        z -= u64(PRIME) - u64(1)
    return z + u64(1)
