# mypy: ignore-errors
"""The CPU kernels: tables of sweeps through memory, hashed at their logical offsets.

In:  addresses as integers. Out: (h, s) written as two uint64 at an address. Nothing is allocated.
Not for mypy: the bodies are numba's language, in which an integer's width matters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba import uint64 as u64

from upguard_plugin.fingerprint import gather, tiles
from upguard_plugin.fingerprint.cache import compile_kernel
from upguard_plugin.fingerprint.gather import MAX_RUN_BYTES, hash_gathered
from upguard_plugin.fingerprint.residues import add, pointer
from upguard_plugin.fingerprint.stretches import hash_stretch
from upguard_plugin.fingerprint.tiles import hash_tile

Row = Any  # memory seen as int64

SCRATCH_BYTES = max(gather.SCRATCH_BYTES, tiles.SCRATCH_BYTES)
MAX_DIMS = 4  # outer dims of one sweep; see `sweeps.py`
TILE_COLUMN = 6 + 3 * MAX_DIMS  # from here on: what a sweep of tiles has besides
MEASURE_COLUMN = TILE_COLUMN + 4  # from here on: for `measure.py`
SWEEP_COLUMNS = MEASURE_COLUMN + 2


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
def _neighbours(row: Row) -> tuple[int, int]:
    """How many short runs follow one another logically, and their distance in memory."""
    innermost = 6 + 3 * (row[5] - 1)
    if row[TILE_COLUMN] or row[5] == 0 or row[3] > MAX_RUN_BYTES:
        return 1, 0
    if row[innermost + 2] != row[3]:
        return 1, 0
    return row[innermost], row[innermost + 1]


@njit
def _hash_rows(table: int, num_sweeps: int, out: int, scratch: int) -> None:
    rows = carray(pointer(u64(table), np.int64), (num_sweeps, SWEEP_COLUMNS))
    for t in range(num_sweeps):
        row = rows[t]
        target = carray(pointer(u64(out + 16 * row[0]), np.uint64), (2,))
        columns = row[TILE_COLUMN]
        neighbours, step = _neighbours(row)
        for run in range(0, count_runs(row), neighbours):
            address, offset = locate_run(row, run)
            if neighbours > 1:
                h, s = hash_gathered(address, step, neighbours, row[3], offset, row[4], scratch)
            elif columns:
                itemsize, row_step = row[TILE_COLUMN + 3], row[TILE_COLUMN + 2]
                h, s = hash_tile(
                    address, offset, row[3] // itemsize, row_step, columns, row[TILE_COLUMN + 1],
                    itemsize, row[4], scratch,
                )  # fmt: skip
            else:
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
def hash_sweeps(table: int, num_sweeps: int, out: int, scratch: int) -> None:
    """Hash many sweeps; each adds its (h, s) to row `slot` of the uint64 pairs at `out`.

    table: address of int64 rows [num_sweeps, SWEEP_COLUMNS]: slot, address, offset, run bytes,
    with_sum, number of dims, then for each dim (size, memory step, logical step), outer first.
    From TILE_COLUMN on, where the bytes of a run are a column of the logical tensor: number of
    columns, their step in memory, the logical step from element to element of a run, bytes of an
    element; else 0. Offsets and steps count bytes.
    scratch: address of SCRATCH_BYTES bytes.
    """
    _hash_rows(table, num_sweeps, out, scratch)


@compile_kernel(nogil=True)
def hash_many_sweeps(table: int, num_sweeps: int, out: int, scratch: int) -> None:
    """As `hash_sweeps`; other Python threads may run meanwhile."""
    _hash_rows(table, num_sweeps, out, scratch)
