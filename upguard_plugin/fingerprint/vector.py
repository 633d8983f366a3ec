# mypy: ignore-errors
"""The inner loop of the CPU kernels, as vector code.

Written in LLVM's terms because a loop left to the compiler cannot prefetch, and at the speed of
memory that is worth a factor of two. Runs on any CPU: LLVM makes what it has of the vectors.

A word is 32 bits, a key 61: their product fits no register. Two ways to sum such products:

    limbs   each key in three limbs; 2048 products with a limb add up in 64 bits without a carry
    fused   on CPUs that multiply 52 x 52 bits and add the low or the high 52 bits of the product
            (AVX512-IFMA): the key's low 52 bits and its rest, no separate additions
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from upguard_plugin.fingerprint import keys
from upguard_plugin.fingerprint.residues import join_fused, join_limbs


def _has(feature: str) -> bool:
    """Whether numba may use this feature of the CPU. A matter of speed only."""
    if config.CPU_NAME or config.CPU_FEATURES:  # the user has told numba to build for another CPU
        return False
    try:
        return bool(binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # LLVM does not know this CPU
        return False


WIDE = _has("avx512f")  # 32 vector registers of 512 bits
FUSED = WIDE and _has("avx512ifma")
LANES = 8 if WIDE else 4  # of 64 bits: one register
# Blocks that share each load of the keys: as many as the registers have room for their sums.
BLOCKS_AT_ONCE = 4 if WIDE else 2
PREFETCH_BYTES = BLOCKS_AT_ONCE * keys.BLOCK_BYTES  # the blocks that come next
FUSED_BITS = 52  # of a factor, and of each half of a product

# Rows of 1024, one column for each pair of words. Limbs: those of neighbouring words share 64 bits,
# as the words of a pair do; halves of 64-bit lanes are what the 32 x 32 bit multiply takes.
KEY_ROWS = (
    np.stack([keys.KEYS_B[0::2], keys.KEYS_B[1::2]])
    if FUSED
    else np.stack([limb.view(np.uint64) for limb in keys.limbs(keys.KEYS_B)])
)
SUMS_PER_BLOCK = 2 if FUSED else 3
join = join_fused if FUSED else join_limbs  # a block's sums to a residue

INT32, INT64 = ir.IntType(32), ir.IntType(64)
BYTE_POINTER = ir.IntType(8).as_pointer()
VECTOR = ir.VectorType(INT64, LANES)


def _every_lane(value: int) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


ZERO, LOW_HALF, HALF_WIDTH = _every_lane(0), _every_lane(0xFFFFFFFF), _every_lane(32)


def vector_sums(num_blocks: int) -> Any:
    """An intrinsic (address, key rows, num_bytes) that sums over pairs of words of some blocks.

    It takes num_bytes of each of `num_blocks` neighbouring blocks, a multiple of 8 * LANES; all
    share each load of the keys. Returns the sum of all pairs as they are, modulo 2**64, and a tuple
    that has for each block the SUMS_PER_BLOCK sums that `join` takes.
    """

    @intrinsic
    def sums_of_blocks(typing_context: Any, address: Any, rows: Any, num_bytes: Any) -> Any:
        of_block = types.UniTuple(types.uint64, SUMS_PER_BLOCK)
        of_blocks = types.UniTuple(of_block, num_blocks)
        load_keys, accumulate = (_fused_keys, _fused) if FUSED else (_limbs, _by_limbs)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, rows, num_bytes = args
            plain = cgutils.alloca_once_value(builder, ZERO)
            sums = [
                [cgutils.alloca_once_value(builder, ZERO) for _ in range(SUMS_PER_BLOCK)]
                for _ in range(num_blocks)
            ]
            start, step = ir.Constant(INT64, 0), ir.Constant(INT64, 8 * LANES)
            with cgutils.for_range_slice(builder, start, num_bytes, step) as (position, _):
                loaded = load_keys(builder, builder.add(rows, position))
                for block in range(num_blocks):
                    shift = ir.Constant(INT64, block * keys.BLOCK_BYTES)
                    here = builder.add(builder.add(address, position), shift)
                    _prefetch(builder, here)
                    pairs = _load(builder, here)
                    _add_to(builder, plain, pairs)
                    accumulate(builder, sums[block], pairs, loaded)
            totals = [
                context.make_tuple(builder, of_block, [_add_lanes(builder, kept) for kept in block])
                for block in sums
            ]
            both = [_add_lanes(builder, plain), context.make_tuple(builder, of_blocks, totals)]
            return context.make_tuple(builder, signature.return_type, both)

        result = types.Tuple((types.uint64, of_blocks))
        return result(types.uint64, types.uint64, types.uint64), generate

    return sums_of_blocks


TILE = 8  # rows and columns of a square that `transpose` turns


def square(itemsize: int) -> Any:
    """An intrinsic (source, source step, target, target step) that transposes TILE x TILE elements.

    Steps are bytes from row to row. Elements are of 1, 2, 4 or 8 bytes.
    """
    row_type = ir.VectorType(ir.IntType(8 * itemsize), TILE)

    @intrinsic
    def turn(typing_context: Any, source: Any, step: Any, target: Any, target_step: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, step, target, target_step = args
            rows = []
            for k in range(TILE):
                address = builder.add(source, builder.mul(step, ir.Constant(INT64, k)))
                rows.append(_load(builder, address, row_type))
            for distance in (1, 2, 4):
                _swap_corners(builder, rows, distance)
            for k, row in enumerate(rows):
                address = builder.add(target, builder.mul(target_step, ir.Constant(INT64, k)))
                builder.store(row, builder.inttoptr(address, row_type.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.none(types.uint64, types.uint64, types.uint64, types.uint64), generate

    return turn


def _swap_corners(builder: Any, rows: list[Any], distance: int) -> None:
    """In each square of 2 x 2 blocks of this size, swap the two blocks off the diagonal."""
    lanes = range(TILE)
    upper = [TILE + lane - distance if lane & distance else lane for lane in lanes]
    lower = [TILE + lane if lane & distance else lane + distance for lane in lanes]
    for k in range(TILE):
        if not k & distance:
            a, b = rows[k], rows[k + distance]
            for row, mask in ((k, upper), (k + distance, lower)):
                constant = ir.Constant(ir.VectorType(INT32, TILE), mask)
                rows[row] = builder.shuffle_vector(a, b, constant)


def _load(builder: Any, address: Any, vector: Any = VECTOR) -> Any:
    loaded = builder.load(builder.inttoptr(address, vector.as_pointer()))
    loaded.align = 1
    return loaded


def _load_row(builder: Any, address: Any, number: int) -> Any:
    return _load(builder, builder.add(address, ir.Constant(INT64, number * KEY_ROWS[0].nbytes)))


def _halves(builder: Any, pairs: Any) -> tuple[Any, Any]:
    return builder.and_(pairs, LOW_HALF), builder.lshr(pairs, HALF_WIDTH)


def _add_to(builder: Any, kept: Any, value: Any) -> None:
    builder.store(builder.add(builder.load(kept), value), kept)


def _limbs(builder: Any, address: Any) -> Any:
    """For each limb, that of the first and that of the second word of each pair."""
    return [_halves(builder, _load_row(builder, address, limb)) for limb in range(3)]


def _by_limbs(builder: Any, sums: Any, pairs: Any, limbs: Any) -> None:
    first, second = _halves(builder, pairs)
    for kept, (low, high) in zip(sums, limbs, strict=True):
        _add_to(builder, kept, builder.mul(first, low))
        _add_to(builder, kept, builder.mul(second, high))


def _fused_keys(builder: Any, address: Any) -> Any:
    """For the first and the second word of each pair: its key, and what lies above 52 bits of it.

    The multiply ignores what lies above 52 bits of its factors.
    """
    above = _every_lane(FUSED_BITS)
    both = [_load_row(builder, address, word) for word in range(2)]
    return [(key, builder.lshr(key, above)) for key in both]


def _fused(builder: Any, sums: Any, pairs: Any, loaded: Any) -> None:
    low, high = sums
    for word, (key, rest) in zip(_halves(builder, pairs), loaded, strict=True):
        _multiply_add(builder, "l", low, word, key)
        _multiply_add(builder, "h", high, word, key)
        _multiply_add(builder, "l", high, word, rest)


def _multiply_add(builder: Any, half: str, kept: Any, x: Any, y: Any) -> None:
    """Add the low or the high 52 bits of the products of 52-bit factors."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = f"llvm.x86.avx512.vpmadd52{half}.uq.512"
    instruction = cgutils.get_or_insert_function(builder.module, signature, name)
    builder.store(builder.call(instruction, [builder.load(kept), x, y]), kept)


def _add_lanes(builder: Any, kept: Any) -> Any:
    vector, total = builder.load(kept), ir.Constant(INT64, 0)
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
