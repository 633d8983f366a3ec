# mypy: ignore-errors
"""The CPU kernel for transposed storage: turned tile by tile in the first-level cache, then hashed.

In:  a sweep whose neighbours in memory are rows of the logical tensor, not columns.
Out: (h, s), as of a contiguous copy, which is never made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba import uint64 as u64

from upguard_plugin.fingerprint.residues import add, pointer
from upguard_plugin.fingerprint.stretches import hash_stretch
from upguard_plugin.fingerprint.vector import TILE, square

Word = Any  # uint64 in a register

LINE_BYTES = 64  # of the cache: all of a line is turned while it is there
MAX_ROWS = 32  # of a band; as many as a line has elements, if that is fewer
WIDTH_BYTES = 2048  # of a band
PITCH_BYTES = WIDTH_BYTES + LINE_BYTES  # rows a power of two apart would fall into one cache set
SCRATCH_BYTES = MAX_ROWS * PITCH_BYTES


def _turner(itemsize: int) -> Any:
    """Turn a band: columns at `source`, `step` bytes apart, become rows PITCH_BYTES apart."""
    turn_square = square(itemsize)
    size, pitch = np.uint64(itemsize), np.uint64(PITCH_BYTES)

    @njit
    def turn_elements(source: Word, step: Word, target: Word, rows: int, columns: int) -> None:
        for column in range(u64(columns)):
            for row in range(u64(rows)):
                old = carray(
                    pointer(source + column * step + row * u64(size), np.uint8), (itemsize,)
                )
                new = carray(
                    pointer(target + row * u64(pitch) + column * u64(size), np.uint8), (itemsize,)
                )
                for k in range(itemsize):
                    new[k] = old[k]

    @njit
    def turn(source: Word, step: Word, target: Word, rows: int, columns: int) -> None:
        whole_rows, whole_columns = rows - rows % TILE, columns - columns % TILE
        for column in range(u64(0), u64(whole_columns), u64(TILE)):
            for row in range(u64(0), u64(whole_rows), u64(TILE)):
                turn_square(
                    source + column * step + row * u64(size), step,
                    target + row * u64(pitch) + column * u64(size), u64(pitch),
                )  # fmt: skip
        below, beside = u64(whole_rows), u64(whole_columns)
        turn_elements(
            source + below * u64(size), step, target + below * u64(pitch),
            rows - whole_rows, whole_columns,
        )  # fmt: skip
        turn_elements(
            source + beside * step, step, target + beside * u64(size),
            rows, columns - whole_columns,
        )  # fmt: skip

    return turn


_turn1, _turn2, _turn4, _turn8 = (_turner(itemsize) for itemsize in (1, 2, 4, 8))


@njit
def _turn_band(
    source: Word, step: Word, target: Word, rows: int, columns: int, itemsize: int
) -> None:
    if itemsize == 4:
        _turn4(source, step, target, rows, columns)
    elif itemsize == 2:
        _turn2(source, step, target, rows, columns)
    elif itemsize == 8:
        _turn8(source, step, target, rows, columns)
    else:
        _turn1(source, step, target, rows, columns)


@njit
def hash_tile(
    address: int, offset: int, rows: int, row_step: int, columns: int, column_step: int,
    itemsize: int, with_sum: int, scratch: int,
) -> tuple[Word, Word]:  # fmt: skip
    """Rows that are neighbours in memory; their columns lie `column_step` bytes apart there.

    In the logical tensor columns are neighbours and rows lie `row_step` bytes apart.
    itemsize: 1, 2, 4 or 8. scratch: address of SCRATCH_BYTES bytes.
    """
    h = s = u64(0)
    band = min(MAX_ROWS, LINE_BYTES // itemsize)
    width = WIDTH_BYTES // itemsize
    for row in range(0, rows, band):
        num_rows = min(band, rows - row)
        for column in range(0, columns, width):
            num_columns = min(width, columns - column)
            source = u64(address + row * itemsize + column * column_step)
            _turn_band(source, u64(column_step), u64(scratch), num_rows, num_columns, itemsize)
            at = offset + row * row_step + column * itemsize
            for k in range(num_rows):
                part_h, part_s = hash_stretch(
                    scratch + k * PITCH_BYTES, num_columns * itemsize, at + k * row_step, with_sum
                )
                h, s = add(h, part_h), s + part_s
    return h, s
