"""The geometry of placements: stretches of split dims, and the pieces that they make.

In:  dims with the stretches that a rank holds of each. Out: `records.Piece`s. Numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from upguard_plugin.records import Piece

Ranges = list[tuple[int, int]]  # (start, end) of stretches, in the order in which a rank holds them


@dataclass(frozen=True, slots=True)
class PlacedDim:
    """A dim with numbers: the rank's size, and which stretches of the logical dim it holds."""

    size: int  # of the rank's tensor, padding included
    logical: int  # of the logical tensor, without padding
    ranges: tuple[tuple[int, int], ...]  # in the logical dim, padding included
    joins_previous: bool = False  # fused to the dim before it


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The number of elements that one step along each dim moves on."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def take_stretch(ranges: Ranges, start: int, end: int) -> Ranges:
    """Stretch start..end of the elements that `ranges` holds one after another."""
    taken: Ranges = []
    at = 0
    for low, high in ranges:
        a, b = max(start, at), min(end, at + high - low)
        if a < b:
            taken.append((low + a - at, low + b - at))
        at += high - low
    return taken


def cut_pieces(dims: list[PlacedDim], ranges: Ranges) -> Iterator[Piece]:
    """The pieces of stretches `ranges` of the rank's tensor with these dims, flattened."""
    sizes = [dim.size for dim in dims]
    local_strides = row_major_strides(sizes)
    logical_strides = row_major_strides([dim.logical for dim in dims])
    numel = prod(sizes)
    held = 0  # elements of the rank's final tensor before this stretch
    for start, end in ranges:
        for box in _boxes(start, min(end, numel), sizes):
            held_parts = [_held_parts(dim, *side) for dim, side in zip(dims, box, strict=True)]
            for corner in product(*held_parts):
                number = sum(c[0] * stride for c, stride in zip(corner, local_strides, strict=True))
                logical = sum(
                    c[1] * stride for c, stride in zip(corner, logical_strides, strict=True)
                )
                yield Piece(
                    tuple(c[2] for c in corner),
                    held + number - start,
                    local_strides,
                    logical,
                    logical_strides,
                )
        held += end - start


def _held_parts(dim: PlacedDim, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """(start on the rank, start in the logical dim, size) of what a dim holds in low..high."""
    at = 0
    for start, end in dim.ranges:
        a, b = max(low, at), min(high, at + end - start)
        b = min(b, at + dim.logical - start)  # the rest is padding
        if a < b:
            yield a, start + a - at, b - a
        at += end - start


def _boxes(start: int, end: int, sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Split stretch start..end of a row-major tensor into boxes: (low, high) for each dim."""
    if start >= end:
        return
    if not sizes:
        yield []
        return
    step = prod(sizes[1:])
    first, last = start // step, (end - 1) // step
    if first == last:  # inside one row
        for box in _boxes(start - first * step, end - first * step, sizes[1:]):
            yield [(first, first + 1), *box]
        return
    if start % step:  # the end of a row
        yield from _boxes(start, (first + 1) * step, sizes)
        start = (first + 1) * step
    rest = end % step
    if start < end - rest:  # whole rows
        yield [(start // step, (end - rest) // step), *((0, size) for size in sizes[1:])]
    if rest:  # the beginning of a row
        yield from _boxes(end - rest, end, sizes)
