# mypy: ignore-errors
"""The inner loop of the CPU kernels, as vector code.

Written in LLVM's terms because a loop left to the compiler cannot prefetch, and at the speed of
memory that is worth a factor of two. Runs on any CPU: LLVM makes what it has of the vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from upguard_plugin.fingerprint import keys


def _has_wide_registers() -> bool:
    """Whether the CPU has 32 vector registers of 512 bits. A matter of speed only."""
    try:
        return bool(binding.get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # LLVM does not know this CPU
        return False


LANES = 8 if _has_wide_registers() else 4  # of 64 bits: one register
# Blocks that share each load of the limbs: as many as the registers have room for their sums.
BLOCKS_AT_ONCE = 4 if _has_wide_registers() else 2
PREFETCH_BYTES = BLOCKS_AT_ONCE * keys.BLOCK_BYTES  # the blocks that come next

# [3, 1024]: limbs of neighbouring words share 64 bits, as the words of a pair do. Halves of 64-bit
# lanes are what the 32 x 32 -> 64 bit vector multiply takes.
LIMBS = np.stack([limb.view(np.uint64) for limb in keys.limbs(keys.KEYS_B)])

INT32, INT64 = ir.IntType(32), ir.IntType(64)
BYTE_POINTER = ir.IntType(8).as_pointer()
VECTOR = ir.VectorType(INT64, LANES)
ZERO = ir.Constant(VECTOR, [0] * LANES)
LOW_HALF = ir.Constant(VECTOR, [0xFFFFFFFF] * LANES)
HALF_WIDTH = ir.Constant(VECTOR, [32] * LANES)


def vector_sums(num_blocks: int) -> Any:
    """An intrinsic (address, limbs, num_bytes) that sums over pairs of words of some blocks.

    It takes num_bytes of each of `num_blocks` neighbouring blocks, a multiple of 8 * LANES; all
    share each load of the limbs. Returns the sum of all pairs as they are, then for each block the
    sums of the products of its words with the three limbs; all modulo 2**64.
    """

    @intrinsic
    def sums_of_blocks(typing_context: Any, address: Any, limbs: Any, num_bytes: Any) -> Any:
        result = types.UniTuple(types.uint64, 1 + 3 * num_blocks)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, limbs, num_bytes = args
            sums = [cgutils.alloca_once_value(builder, ZERO) for _ in range(1 + 3 * num_blocks)]
            start, step = ir.Constant(INT64, 0), ir.Constant(INT64, 8 * LANES)
            with cgutils.for_range_slice(builder, start, num_bytes, step) as (position, _):
                tables = [_limb(builder, builder.add(limbs, position), k) for k in range(3)]
                for block in range(num_blocks):
                    shift = ir.Constant(INT64, block * keys.BLOCK_BYTES)
                    here = builder.add(builder.add(address, position), shift)
                    _prefetch(builder, here)
                    pair = _load(builder, here)
                    _accumulate(builder, sums[0], pair)
                    first, second = _halves(builder, pair)
                    for kept, (low, high) in zip(sums[1 + 3 * block :], tables, strict=False):
                        _accumulate(builder, kept, builder.mul(first, low))
                        _accumulate(builder, kept, builder.mul(second, high))
            totals = [_add_lanes(builder, builder.load(kept)) for kept in sums]
            return context.make_tuple(builder, signature.return_type, totals)

        return result(types.uint64, types.uint64, types.uint64), generate

    return sums_of_blocks


def _load(builder: Any, address: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, VECTOR.as_pointer()))
    loaded.align = 1
    return loaded


def _halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    return builder.and_(pairs, LOW_HALF), builder.lshr(pairs, HALF_WIDTH)


def _limb(builder: Any, address: Any, number: int) -> tuple[Any, Any]:
    """Limb 0, 1 or 2 of the first and the second word of each pair."""
    table = ir.Constant(INT64, number * LIMBS[0].nbytes)
    return _halves(builder, _load(builder, builder.add(address, table)))


def _accumulate(builder: Any, kept: Any, value: Any) -> None:
    builder.store(builder.add(builder.load(kept), value), kept)


def _add_lanes(builder: Any, vector: Any) -> Any:
    total = ir.Constant(INT64, 0)
    for lane in range(LANES):
        total = builder.add(total, builder.extract_element(vector, ir.Constant(INT32, lane)))
    return total


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for what this loop reads PREFETCH_BYTES later; an address beyond memory does no harm."""
    signature = ir.FunctionType(ir.VoidType(), [BYTE_POINTER, INT32, INT32, INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    ahead = builder.add(address, ir.Constant(INT64, PREFETCH_BYTES))
    read, to_level_2, data = (ir.Constant(INT32, flag) for flag in (0, 2, 1))
    builder.call(prefetch, [builder.inttoptr(ahead, BYTE_POINTER), read, to_level_2, data])
