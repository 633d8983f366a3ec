# mypy: ignore-errors
"""The CPU kernels: runs of bytes at memory addresses, hashed at their logical offsets.

In:  addresses as integers. Out: (h, s) written as two uint64 at an address. Nothing is allocated.
Not for mypy: the bodies are numba's language, in which an integer's width matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba import uint64 as u64
from numba.core import cgutils
from numba.extending import intrinsic

from upguard_plugin.fingerprint import keys
from upguard_plugin.fingerprint.cache import compile_kernel
from upguard_plugin.fingerprint.residues import add, join_limbs, key_a, multiply, pointer

Word = Any  # uint64 in a register
Words = Any  # memory seen as uint64
Bytes = Any  # memory seen as uint8
Row = Any  # memory seen as int64

MAX_DIMS = 4  # outer dims of one sweep; see `sweeps.py`
SWEEP_COLUMNS = 8 + 3 * MAX_DIMS  # the last two are for `measure.py`

KEYS_B = np.array(keys.KEYS_B)
# [3, 1024]: limbs of neighbouring words share 64 bits, as the words of a pair do. Halves of 64-bit
# lanes are what the 32 x 32 -> 64 bit vector multiply takes.
LIMBS = np.stack([limb.view(np.uint64) for limb in keys.limbs(keys.KEYS_B)])
PAIRS_PER_BLOCK = keys.BLOCK_WORDS // 2
LANES = 8  # one AVX-512 register, two of AVX2
PREFETCH_BYTES = 2 * keys.BLOCK_BYTES  # far enough for memory, and still in L2 when it is used


@intrinsic
def _vector_sums(typing_context: Any, address: Any, limbs: Any, num_bytes: Any) -> Any:
    """Sums over num_bytes / 8 pairs of words: their products with each limb, and the pairs as is.

    Written as vector code because a loop left to the compiler cannot prefetch. `address` and
    `limbs` are read 64 bytes at a time; num_bytes is a multiple of 64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, limbs, num_bytes = args
        int32, int64 = ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(int64, LANES)
        low_half = ir.Constant(vector, [0xFFFFFFFF] * LANES)
        half_width = ir.Constant(vector, [32] * LANES)
        byte_pointer = ir.IntType(8).as_pointer()
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]),
            "llvm.prefetch.p0i8",
        )

        def load(at: Any) -> Any:
            loaded = builder.load(builder.inttoptr(at, vector.as_pointer()))
            loaded.align = 1
            return loaded

        zero = ir.Constant(vector, [0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(4)]
        step = ir.Constant(int64, 8 * LANES)
        start = ir.Constant(int64, 0)
        with cgutils.for_range_slice(builder, start, num_bytes, step) as (position, _):
            here = builder.add(address, position)
            ahead = builder.add(here, ir.Constant(int64, PREFETCH_BYTES))
            where = [ir.Constant(int32, flag) for flag in (0, 2, 1)]  # read, to L2, data
            builder.call(prefetch, [builder.inttoptr(ahead, byte_pointer), *where])
            pair = load(here)
            first, second = builder.and_(pair, low_half), builder.lshr(pair, half_width)
            for k in range(3):
                table = ir.Constant(int64, k * 8 * PAIRS_PER_BLOCK)
                limb = load(builder.add(limbs, builder.add(position, table)))
                products = builder.add(
                    builder.mul(first, builder.and_(limb, low_half)),
                    builder.mul(second, builder.lshr(limb, half_width)),
                )
                builder.store(builder.add(builder.load(sums[k]), products), sums[k])
            builder.store(builder.add(builder.load(sums[3]), pair), sums[3])
        totals = []
        for kept in sums:
            lanes = builder.load(kept)
            total = ir.Constant(int64, 0)
            for k in range(LANES):
                total = builder.add(total, builder.extract_element(lanes, ir.Constant(int32, k)))
            totals.append(total)
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.uint64, 4)(types.uint64, types.uint64, types.uint64), generate


@njit
def _block_sums(pairs: Words, first: int) -> tuple[Word, Word, Word, Word]:
    """The sums of `_vector_sums` over pairs that lie in one block, from its pair `first` on."""
    whole = pairs.shape[0] & ~(LANES - 1)
    a0, a1, a2, s = _vector_sums(
        u64(pairs.ctypes.data), u64(LIMBS.ctypes.data + 8 * first), u64(8 * whole)
    )
    for k in range(whole, pairs.shape[0]):
        x, y = pairs[k] & u64(0xFFFFFFFF), pairs[k] >> u64(32)
        limb0, limb1, limb2 = LIMBS[0, first + k], LIMBS[1, first + k], LIMBS[2, first + k]
        a0 += x * (limb0 & u64(0xFFFFFFFF)) + y * (limb0 >> u64(32))
        a1 += x * (limb1 & u64(0xFFFFFFFF)) + y * (limb1 >> u64(32))
        a2 += x * (limb2 & u64(0xFFFFFFFF)) + y * (limb2 >> u64(32))
        s += pairs[k]
    return a0, a1, a2, s


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
        n = min(PAIRS_PER_BLOCK - c, num_pairs - i)
        a0, a1, a2, block_s = _block_sums(pairs[i : i + n], c)
        s += block_s
        h = add(h, multiply(join_limbs(a0, a1, a2), key_a(u64((first + i) >> 10))))
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
