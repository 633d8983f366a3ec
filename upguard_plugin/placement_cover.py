"""Do the placements of several ranks make up the whole logical tensor, each element once?

In:  the placements of the parts that are to be merged, replicas left out.
Out: nothing, or a PlacementError that names the first gap or overlap. No torch, no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from upguard_plugin.errors import PlacementError
from upguard_plugin.records import Piece, Placement

CANNOT_MERGE = "cannot merge "  # how the sentences of errors begin

Ints = npt.NDArray[np.int64]


def check_cover(placements: Sequence[Placement], name: str = "") -> None:
    """Raise PlacementError unless the parts cover their logical tensor exactly once.

    name: of the tensor, for the message. Work and memory grow with the number of contiguous
    stretches in the parts, not with their elements.
    """
    what = CANNOT_MERGE + (name or "these parts")
    shapes = {placement.logical_shape for placement in placements}
    if len(shapes) != 1:
        found = ", ".join(str(list(shape)) for shape in sorted(shapes)) or "none"
        raise PlacementError(f"{what}: one logical shape is needed", evidence={"found": found})
    shape = shapes.pop()
    starts, lengths, owners = _stretches(placements)
    order = np.argsort(starts, kind="stable")
    starts, lengths, owners = starts[order], lengths[order], owners[order]
    ends = starts + lengths
    specs = {"logical": f"shape {list(shape)}"}
    clash = np.flatnonzero(starts[1:] < ends[:-1])
    if len(clash):
        k = int(clash[0])
        first, second = (placements[int(owners[i])].spec for i in (k, k + 1))
        raise PlacementError(
            f"{what}: parts {int(owners[k])} and {int(owners[k + 1])} overlap "
            f"at element {_coordinates(int(starts[k + 1]), shape)}",
            evidence=specs | {"placements": f"{first!r}, {second!r}"},
            remedy="name the axis that splits the tensor, or leave replicas out",
        )
    # With no overlap, the first gap is where a stretch does not begin at the end of the last one.
    edges = np.concatenate([[0], ends])
    gap = np.flatnonzero(np.concatenate([starts, [prod(shape)]]) != edges)
    if len(gap):
        found = ", ".join(sorted({repr(placement.spec) for placement in placements}))
        raise PlacementError(
            f"{what}: no part holds element {_coordinates(int(edges[gap[0]]), shape)}",
            evidence=specs | {"placements": found, "parts": len(placements)},
            remedy="a rank's part is missing, or a placement names too many axes",
        )


def _stretches(placements: Sequence[Placement]) -> tuple[Ints, Ints, Ints]:
    """Start and length of each contiguous stretch of logical elements, and which part holds it."""
    starts: list[Ints] = []
    lengths: list[Ints] = []
    owners: list[Ints] = []
    for k, placement in enumerate(placements):
        for piece in placement.pieces:
            if prod(piece.sizes) == 0:
                continue
            found, length = _piece_stretches(piece)
            starts.append(found)
            lengths.append(np.full(len(found), length))
            owners.append(np.full(len(found), k))
    none = [np.zeros(0, np.int64)]
    return tuple(np.concatenate(none + one) for one in (starts, lengths, owners))  # type: ignore[return-value]


def _piece_stretches(piece: Piece) -> tuple[Ints, int]:
    dims = list(zip(piece.sizes, piece.logical_strides, strict=True))
    length = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    starts = np.array([piece.logical_start], np.int64)
    for size, stride in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _coordinates(number: int, shape: tuple[int, ...]) -> list[int]:
    where: list[int] = []
    for size in reversed(shape):
        number, k = divmod(number, size)
        where.append(k)
    return where[::-1]
