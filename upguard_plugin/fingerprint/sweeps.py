"""From strides and placement to sweeps: which runs of memory go to which logical offsets.

In:  a dense tensor's shape, strides and element size, and its `Placement` where one is known.
Out: sweeps, each a nest of loops over contiguous runs. In transposed storage a run is a column of
     the logical tensor, and the sweep goes in tiles. None where there are no runs worth it: then a
     contiguous copy of the tensor is swept instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from upguard_plugin.errors import PlacementError
from upguard_plugin.fingerprint.keys import MAX_BYTES
from upguard_plugin.records import Piece, Placement

MAX_DIMS = 4  # of one sweep; deeper nests become several sweeps
TILE_ITEMSIZES = (1, 2, 4, 8)
SHORT_RUN_BYTES = 64  # below it the work per run costs more than a contiguous copy of the tensor


@dataclass(frozen=True, slots=True)
class Dim:
    """A loop: so many steps, so far apart in memory and in the logical tensor."""

    size: int
    memory: int
    logical: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs of `run_bytes` bytes, `start` bytes into memory, `offset` into the logical tensor."""

    start: int
    offset: int
    run_bytes: int
    dims: tuple[Dim, ...]  # outer first, steps in bytes
    tile: Tile | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a sweep through transposed storage: a run holds a column of the logical tensor."""

    columns: int
    memory: int  # bytes from column to column
    logical: int  # bytes from one element of a run to the next
    itemsize: int


def plan_sweeps(
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    placement: Placement | None,
    *,
    any_run: bool = False,
    tiles: bool = False,
) -> tuple[Sweep, ...] | None:
    """The sweeps that cover a tensor, or None if a contiguous copy has to be made first.

    strides count elements. any_run: take short runs too, as GPUs can. tiles: go through transposed
    storage in tiles.
    Raises PlacementError if the placement does not fit the shape.
    """
    shape, strides = tuple(shape), tuple(strides)
    numbering = row_major_strides(shape)
    if placement is None:
        whole = Piece(shape, 0, numbering, 0, numbering)
        pieces: tuple[Piece, ...] = (whole,)
        logical_numel = prod(shape)
    else:
        check_fit(placement, shape)
        pieces, logical_numel = placement.pieces, prod(placement.logical_shape)
    if logical_numel * itemsize >= MAX_BYTES:
        raise PlacementError(
            f"a tensor of {logical_numel} elements of {itemsize} bytes is beyond 2**63 bytes"
        )
    contiguous = strides_match(shape, strides, numbering)
    sweeps: list[Sweep] = []
    for piece in pieces:
        if prod(piece.sizes) == 0:
            continue
        memory = (
            (piece.local_start, piece.local_strides)
            if contiguous
            else _memory_strides(piece, shape, strides, numbering)
        )
        if memory is None:
            return None
        dims = _coalesce(piece.sizes, memory[1], piece.logical_strides)
        run = 1
        if dims and dims[-1].memory == dims[-1].logical == 1:
            run = dims.pop().size
        short = run * itemsize < SHORT_RUN_BYTES and prod(shape) > run
        tile = None
        if short and not contiguous and not any_run:
            if tiles and run == 1:
                run, tile = _take_tile(dims, itemsize)
            if tile is None:
                return None
        sweeps.extend(_split(memory[0], piece.logical_start, run, dims, itemsize, tile))
    return tuple(sweeps)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def strides_match(shape: Sequence[int], strides: Sequence[int], numbering: Sequence[int]) -> bool:
    """Whether a tensor lies in memory in row-major order; strides of single steps do not count."""
    return 0 in shape or all(
        size == 1 or stride == number
        for size, stride, number in zip(shape, strides, numbering, strict=True)
    )


def check_fit(placement: Placement, shape: tuple[int, ...]) -> None:
    """Raise PlacementError if a piece reaches outside the rank's tensor or the logical one."""
    numel, logical_numel = prod(shape), prod(placement.logical_shape)
    for piece in placement.pieces:
        if prod(piece.sizes) == 0:
            continue
        steps = [size - 1 for size in piece.sizes]
        for start, strides, limit in (
            (piece.local_start, piece.local_strides, numel),
            (piece.logical_start, piece.logical_strides, logical_numel),
        ):
            reach = [n * stride for n, stride in zip(steps, strides, strict=True)]
            low = start + sum(r for r in reach if r < 0)
            high = start + sum(r for r in reach if r > 0)
            if low < 0 or high >= limit:
                raise PlacementError(
                    f"placement {placement.spec!r} does not fit a tensor of shape {list(shape)}",
                    evidence={
                        "logical": f"shape {list(placement.logical_shape)}",
                        "reaches": f"elements {low} to {high} of {limit}",
                    },
                )


def _memory_strides(
    piece: Piece, shape: tuple[int, ...], strides: tuple[int, ...], numbering: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """Where a piece lies in memory: start and strides, or None if it is no regular nest of steps.

    A piece counts the tensor's elements in row-major order. A step of the piece is a step in memory
    as long as it moves along one dim of the tensor and never carries into the next outer dim.
    """
    digits = [piece.local_start // n % size for n, size in zip(numbering, shape, strict=True)]
    start = sum(digit * stride for digit, stride in zip(digits, strides, strict=True))
    steps: list[int] = []
    for size, step in zip(piece.sizes, piece.local_strides, strict=True):
        dim = next((d for d, n in enumerate(numbering) if shape[d] > 1 and n <= step), None)
        if size == 1 or step == 0:
            steps.append(0)
            continue
        if dim is None or step % numbering[dim]:
            return None
        times = step // numbering[dim]
        digits[dim] += times * (size - 1)
        if digits[dim] >= shape[dim]:
            return None
        steps.append(times * strides[dim])
    return start, tuple(steps)


def _coalesce(sizes: Sequence[int], memory: Sequence[int], logical: Sequence[int]) -> list[Dim]:
    """Loops without single steps, neighbours that continue each other joined."""
    dims: list[Dim] = []
    for size, m, g in zip(sizes, memory, logical, strict=True):
        if size == 1:
            continue
        if dims and (dims[-1].memory, dims[-1].logical) == (m * size, g * size):
            dims[-1] = Dim(dims[-1].size * size, m, g)
        else:
            dims.append(Dim(size, m, g))
    return dims


def _take_tile(dims: list[Dim], itemsize: int) -> tuple[int, Tile | None]:
    """Take the loops of a tile out of `dims`: the length of a run and the tile, if there is one."""
    along = next((dim for dim in dims if dim.memory == 1), None)
    across = next((dim for dim in dims if dim.logical == 1 and dim.memory > 0), None)
    if along is None or across is None or itemsize not in TILE_ITEMSIZES:
        return 1, None
    if along.size * itemsize < SHORT_RUN_BYTES or along.logical <= 0:
        return 1, None
    dims.remove(along)
    dims.remove(across)
    step = along.logical * itemsize
    return along.size, Tile(across.size, across.memory * itemsize, step, itemsize)


def _split(
    start: int, offset: int, run: int, dims: list[Dim], itemsize: int, tile: Tile | None
) -> Iterator[Sweep]:
    """One sweep for each setting of the loops that are too deep for one."""
    outer, inner = dims[:-MAX_DIMS], dims[-MAX_DIMS:]
    scaled = tuple(Dim(d.size, d.memory * itemsize, d.logical * itemsize) for d in inner)
    for position in product(*(range(d.size) for d in outer)):
        moved = list(zip(position, outer, strict=True))
        memory = start + sum(k * d.memory for k, d in moved)
        logical = offset + sum(k * d.logical for k, d in moved)
        yield Sweep(memory * itemsize, logical * itemsize, run * itemsize, scaled, tile)
