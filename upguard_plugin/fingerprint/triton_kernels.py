# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""The Triton kernels. Integer atomics commute: the result does not depend on scheduling.

In:  typed memory and numbers that say where it lies in the logical tensor.
Out: added to a row of the device's table: h as low 32 and high 29 bits in two int64, then s.
     If MEASURED, added to a row of measures in the same pass: non-finite count, largest finite
     magnitude, SIZE buckets of the sketch. Those are float64 and depend on scheduling in their
     last bits. BY_TABLE: the numbers are bytes, and `values` holds what each stands for.
Not for mypy: the bodies are Triton's language. Argument names follow `sweeps.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from upguard_plugin.fingerprint import keys

SEED_A = tl.constexpr(keys.SEED_A)
SEED_BLOCK_SIGN = tl.constexpr(keys.SEED_BLOCK_SIGN)
GOLDEN = tl.constexpr(keys.GOLDEN)
MIX1 = tl.constexpr(keys.MIX1)
MIX2 = tl.constexpr(keys.MIX2)
PRIME = tl.constexpr(keys.FINGERPRINT_PRIME)
WORDS = tl.constexpr(keys.BLOCK_WORDS)
STRETCH = tl.constexpr(1024)  # numbers measured at once: as many of the widest as a block holds


@triton.jit
def mix(z):
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    return z ^ (z >> 31)


@triton.jit
def fold(x):
    return (x & PRIME) + (x >> 61)


@triton.jit
def reduce_once(x):
    return tl.where(x >= PRIME, x - PRIME, x)


@triton.jit
def key_a(block):
    z = mix((block + 1) * GOLDEN + SEED_A) >> 3
    return tl.where(z >= PRIME - 1, z - (PRIME - 1), z) + 1


@triton.jit
def multiply(x, y):
    x0 = x & 0xFFFFFFFF
    x1 = x >> 32
    y0 = y & 0xFFFFFFFF
    y1 = y >> 32
    middle = x1 * y0 + x0 * y1
    r = fold(x0 * y0) + ((middle & 0x1FFFFFFF) << 32) + (middle >> 29)
    return reduce_once(fold(r + ((x1 * y1) << 3)))


@triton.jit
def join_limbs(a0, a1, a2):
    a1 = fold(fold(a1))
    a2 = fold(fold(a2))
    r = fold(fold(a0) + ((a1 & ((1 << 40) - 1)) << 21) + (a1 >> 40))
    return reduce_once(fold(r + ((a2 & ((1 << 19) - 1)) << 42) + (a2 >> 19)))


@triton.jit
def add_to_slot(out, h, s, WITH_SUM: tl.constexpr):
    tl.atomic_add(out, tl.sum((h & 0xFFFFFFFF).to(tl.int64)))
    tl.atomic_add(out + 1, tl.sum((h >> 32).to(tl.int64)))
    if WITH_SUM:
        tl.atomic_add(out + 2, tl.sum(s.to(tl.int64, bitcast=True)))


@triton.jit
def finite_numbers(number, values, mask, BY_TABLE: tl.constexpr):
    """Numbers as float64, with 0 for those that are not finite or masked; 1 where not finite."""
    if BY_TABLE:
        number = tl.load(values + number.to(tl.int32), mask=mask, other=0)
    value = tl.where(mask, number.to(tl.float64), 0.0)
    finite = tl.abs(value) < float("inf")
    return tl.where(finite, value, 0.0), tl.where(finite, 0, 1)


@triton.jit
def rotation_of(block, SIZE: tl.constexpr):
    return ((mix((block * GOLDEN) ^ SEED_BLOCK_SIGN) >> 20) & (SIZE - 1)).to(tl.int64)


@triton.jit
def apply_signs(value, block, column, column_signs, SIZE: tl.constexpr):
    lane = (column & (SIZE - 1)).to(tl.uint64)
    word = 4 * block + 1
    if SIZE > 64:
        word += lane >> 6
    negative = (mix(word * GOLDEN + SEED_BLOCK_SIGN) >> (lane & 63)) & 1
    value *= tl.load(column_signs + column)
    return tl.where(negative == 1, -value, value)


@triton.jit
def add_magnitudes(out, nonfinite, largest):
    tl.atomic_add(out, tl.sum(nonfinite).to(tl.float64))
    # Bits of floats that are not negative are in the order of the floats.
    bits = tl.max(largest).to(tl.int64, bitcast=True)
    tl.atomic_max((out + 1).to(tl.pointer_type(tl.int64)), bits)


@triton.jit
def read_stretch(
    numbers, values, column_signs, start, first, count, BY_TABLE: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The STRETCH numbers from the logical number `start` on, each in the place of its bucket.

    The place modulo SIZE is the bucket: then what comes from many blocks adds up in registers.
    """
    logical = start + tl.arange(0, STRETCH)
    block = (start >> 11).to(tl.uint64)
    if SIZE > 0:
        lane = (logical - rotation_of(block, SIZE)) & (SIZE - 1)
        logical = (logical & -SIZE) + lane
    mask = (logical >= first) & (logical < first + count)
    number = tl.load(numbers + (logical - first), mask=mask, other=0)
    value, nonfinite = finite_numbers(number, values, mask, BY_TABLE)
    signed = value
    if SIZE > 0:
        signed = apply_signs(value, block, logical & (WORDS - 1), column_signs, SIZE)
    return tl.abs(value), nonfinite, signed


@triton.jit
def hash_blocks(
    words, table, keys_b, out, first, num_words, first_block, num_blocks,
    numbers, first_number, num_numbers, WIDTH: tl.constexpr, values, column_signs, measures,
    BLOCKS: tl.constexpr, IN_TABLE: tl.constexpr, WITH_SUM: tl.constexpr,
    MEASURED: tl.constexpr, BY_TABLE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A contiguous run of int32 words that begins at logical word `first`.

    Each program takes BLOCKS <= 2048 blocks and keeps exact 64-bit sums per word column: products
    of a 32-bit word and a 21-bit limb of A. B is multiplied once, at the end.
    If MEASURED, `numbers` is the same memory, WIDTH bytes each: a block is measured right after it
    was hashed, from the first-level cache.
    """
    column = tl.arange(0, WORDS)
    a0 = tl.zeros([WORDS], tl.uint64)
    a1 = tl.zeros([WORDS], tl.uint64)
    a2 = tl.zeros([WORDS], tl.uint64)
    s = tl.zeros([WORDS], tl.uint64)
    if MEASURED:
        nonfinite = tl.zeros([STRETCH], tl.int32)
        largest = tl.zeros([STRETCH], tl.float64)
        buckets = tl.zeros([STRETCH], tl.float64)
    begin = tl.program_id(0).to(tl.int64) * BLOCKS
    for k in range(BLOCKS):
        block = first_block + begin + k
        position = block * WORDS + column - first
        mask = (position >= 0) & (position < num_words)
        word = tl.load(words + position, mask=mask, other=0)
        word = word.to(tl.uint32, bitcast=True).to(tl.uint64)
        if IN_TABLE:
            limb = table + 4 * tl.minimum(block, first_block + num_blocks - 1)
            a0 += word * tl.load(limb).to(tl.uint32, bitcast=True).to(tl.uint64)
            a1 += word * tl.load(limb + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
            a2 += word * tl.load(limb + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
        else:
            key = key_a(block.to(tl.uint64))
            a0 += word * (key & 0x1FFFFF)
            a1 += word * ((key >> 21) & 0x1FFFFF)
            a2 += word * (key >> 42)
        if WITH_SUM:
            s += word
        if MEASURED:
            for part in tl.static_range(8 // WIDTH):
                magnitude, more, signed = read_stretch(
                    numbers, values, column_signs, (block * (8 // WIDTH) + part) * STRETCH,
                    first_number, num_numbers, BY_TABLE, SIZE,
                )  # fmt: skip
                nonfinite += more
                largest = tl.maximum(largest, magnitude)
                if SIZE > 0:
                    buckets += signed
    key_b = tl.load(keys_b + column).to(tl.uint64, bitcast=True)
    h = multiply(join_limbs(a0, a1, a2), key_b)
    add_to_slot(out, h, s << ((column & 1) * 32).to(tl.uint64), WITH_SUM)
    if MEASURED:
        add_magnitudes(measures, nonfinite, largest)
        if SIZE > 0:
            sums = tl.sum(tl.reshape(buckets, [STRETCH // SIZE, SIZE]), axis=0)
            tl.atomic_add(measures + 2 + tl.arange(0, SIZE), sums)


@triton.jit
def hash_small(table, keys_b):
    """Many short runs that lie at logical word 0: one program each.

    table: int64 rows of address, number of int32 words, address of the row of the slot, with_sum.
    """
    row = table + 4 * tl.program_id(0).to(tl.int64)
    words = tl.load(row).to(tl.pointer_type(tl.int32))
    num_words = tl.load(row + 1)
    out = tl.load(row + 2).to(tl.pointer_type(tl.int64))
    column = tl.arange(0, WORDS)
    key_b = tl.load(keys_b + column).to(tl.uint64, bitcast=True)
    h = tl.zeros([WORDS], tl.uint64)
    s = tl.zeros([WORDS], tl.uint64)
    for block in range(tl.cdiv(num_words, WORDS)):
        position = block * WORDS + column
        word = tl.load(words + position, mask=position < num_words, other=0)
        word = word.to(tl.uint32, bitcast=True).to(tl.uint64)
        h = reduce_once(h + multiply(word, key_a(tl.cast(block, tl.uint64))))
        s += word
    s = tl.where(tl.load(row + 3) != 0, s << ((column & 1) * 32).to(tl.uint64), 0)
    add_to_slot(out, multiply(h, key_b), s, True)


@triton.jit
def place_elements(
    element, start, source, run,
    size0, memory0, logical0, size1, memory1, logical1,
    size2, memory2, logical2, size3, memory3, logical3,
):  # fmt: skip
    """Where elements lie, in memory and in the logical tensor: e is e % run of run e // run."""
    rest = element // run
    memory = source + element % run
    logical = start + element % run
    memory += rest % size0 * memory0
    logical += rest % size0 * logical0
    rest = rest // size0
    memory += rest % size1 * memory1
    logical += rest % size1 * logical1
    rest = rest // size1
    memory += rest % size2 * memory2
    logical += rest % size2 * logical2
    rest = rest // size2
    memory += rest % size3 * memory3
    logical += rest % size3 * logical3
    return memory, logical


@triton.jit
def hash_words(word, index, keys_b):
    key_b = tl.load(keys_b + (index & (WORDS - 1)).to(tl.int64)).to(tl.uint64, bitcast=True)
    return multiply(word, multiply(key_b, key_a(index >> 11)))


@triton.jit
def hash_elements(
    elements, keys_b, out, total, start, source, run,
    size0, memory0, logical0, size1, memory1, logical1,
    size2, memory2, logical2, size3, memory3, logical3,
    values, column_signs, measures,
    WIDTH: tl.constexpr, ELEMENTS: tl.constexpr, WITH_SUM: tl.constexpr,
    MEASURED: tl.constexpr, BY_TABLE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Any sweep, in elements of WIDTH = 1, 2 or 4 bytes inside one word each, or of two words.

    If MEASURED, the elements are the numbers themselves.
    """
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    memory, logical = place_elements(
        element, start, source, run,
        size0, memory0, logical0, size1, memory1, logical1,
        size2, memory2, logical2, size3, memory3, logical3,
    )  # fmt: skip
    mask = element < total
    number = tl.load(elements + memory, mask=mask, other=0)
    if WIDTH == 1:
        bits = number.to(tl.uint8, bitcast=True)
    elif WIDTH == 2:
        bits = number.to(tl.uint16, bitcast=True)
    elif WIDTH == 4:
        bits = number.to(tl.uint32, bitcast=True)
    else:
        bits = number.to(tl.uint64, bitcast=True)
    position = logical.to(tl.uint64) * WIDTH
    bits = bits.to(tl.uint64) << ((position & 3) * 8)
    index = position >> 2
    h = hash_words(bits & 0xFFFFFFFF, index, keys_b)
    if WIDTH == 8:
        h += hash_words(bits >> 32, index + 1, keys_b)
    add_to_slot(out, h, bits << ((index & 1) * 32), WITH_SUM)
    if MEASURED:
        value, nonfinite = finite_numbers(number, values, mask, BY_TABLE)
        add_magnitudes(measures, nonfinite, tl.abs(value))
        if SIZE > 0:
            block = (logical >> 11).to(tl.uint64)
            bucket = (logical + rotation_of(block, SIZE)) & (SIZE - 1)
            signed = apply_signs(value, block, logical & (WORDS - 1), column_signs, SIZE)
            tl.atomic_add(measures + 2 + bucket, signed, mask=mask)
