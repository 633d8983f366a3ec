"""Padding: elements among others that hold no value of the run, as in a flat buffer cut into parts.

In:  storages, of which some bytes are blank: nobody ever wrote them, or only copies of such bytes.
Out: which elements of a tensor are blank, and the placement of all others.

Only tensors without gaps are looked at. A write with gaps leaves it open which bytes are blank: of
such storages nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from torch import Tensor

from upguard_plugin.capture.extents import Extent
from upguard_plugin.capture.storages import Storage, Storages
from upguard_plugin.records import Piece, Placement

Elements = tuple[tuple[int, int], ...]  # (first, one after the last), in order, without overlap
_NO_RULE = "*"  # nothing is said of how ranks split it
_KEPT = 4096


def blank_elements(storage: Storage, tensor: Tensor) -> Elements | None:
    """The elements of a tensor without a value, as they lie in memory; None: it is not known."""
    if not tensor.is_contiguous() or not storage.knows_blank:
        return None
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    found = []
    for low, high in storage.blank_extents:
        first, last = max(low, begin), min(high, begin + tensor.nbytes - 1)
        if first <= last:
            found.append(((first - begin) // size, (last - begin) // size + 1))
    return union(found)


def union(elements: Iterable[tuple[int, int]]) -> Elements:
    """All of them, in order."""
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(elements):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((first, stop))
    return tuple(merged)


def is_all(elements: Elements, tensor: Tensor) -> bool:
    """Whether these are all elements of the tensor."""
    return elements == ((0, tensor.numel()),)


def make_blank(storages: Storages, storage: Storage, tensor: Tensor, elements: Elements) -> None:
    """Say of elements of a tensor that they hold no value now; not of one with gaps."""
    if elements and tensor.is_contiguous():
        for extent in _extents(tensor, elements):
            storage.blank(extent)
        storage.pads = storages.have_padding = True


def _extents(tensor: Tensor, elements: Elements) -> tuple[Extent, ...]:
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    return tuple((begin + first * size, begin + stop * size - 1) for first, stop in elements)


@lru_cache(maxsize=_KEPT)
def without(blank: Elements, shape: tuple[int, ...]) -> Placement:
    """The placement of the other elements of a whole tensor."""
    pieces = tuple(
        Piece((stop - first,), first, (1,), first, (1,))
        for first, stop in _between(blank, prod(shape))
    )
    return Placement(_NO_RULE, shape, pieces)


def tell(storages: Storages, flat: Tensor, values: Sequence[tuple[int, int]]) -> None:
    """Say which elements of a flat tensor are values, in order; all others are padding for good.

    For those who know of memory that was there before writes were followed.
    """
    storage, gaps = storages.find(flat), _between(values, flat.numel())
    if storage is not None and gaps:
        make_blank(storages, storage, flat, gaps)
        storage.keep_blank(_extents(flat, gaps))


def tell_placed(storages: Storages, flat: Tensor, placement: Placement) -> None:
    """Say that what the placement of a flat tensor leaves out is padding now."""
    storage = storages.find(flat)
    if storage is not None and flat.dim() == 1:
        pieces = sorted(placement.pieces, key=lambda piece: piece.local_start)
        values = [(piece.local_start, piece.local_start + piece.sizes[0]) for piece in pieces]
        make_blank(storages, storage, flat, _between(values, flat.numel()))


def keep_freed(storages: Storages, tensor: Tensor) -> None:
    """Say of a tensor with memory that nobody wrote that it is kept for its graph alone.

    What operators make of it element by element is no value either.
    """
    storage = storages.find(tensor)
    if storage is not None and not storage.has_value(tensor):
        storage.pads = storages.have_padding = True


def _between(values: Sequence[tuple[int, int]], num_elements: int) -> Elements:
    """The elements that are in none of these stretches."""
    ends = (0, *(stop for _, stop in values))
    begins = (*(first for first, _ in values), num_elements)
    return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)
