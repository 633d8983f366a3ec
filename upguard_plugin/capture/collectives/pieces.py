"""Where the piece of one rank lies in what a collective makes of all pieces.

Fingerprints taken at these places add up over the ranks: the inputs of an all_gather sum to its
output, the inputs of all members of an all_to_all to the outputs of all of them. All sizes count
elements. Equal arguments give the same object, so that events that repeat share one key.
"""

from __future__ import annotations

from functools import lru_cache

from upguard_plugin.records import Piece, Placement

# Cells of an exchange are that far apart: no rank knows how much the others send to each other, so
# the place of a cell must not depend on it.
_CELL = 1 << 31
_KEPT = 4096


@lru_cache(maxsize=_KEPT)
def chunk(start: int, size: int, logical_shape: tuple[int, ...]) -> Placement:
    """A tensor of `size` elements that is elements `start` and following of a buffer."""
    piece = Piece((size,), 0, (1,), start, (1,))
    return Placement(f"flat[@{start}:{start + size}]", logical_shape, (piece,))


@lru_cache(maxsize=_KEPT)
def exchange(
    parts: tuple[tuple[int, int], ...],
    rank: int,
    num_members: int,
    *,
    sends: bool,
) -> Placement:
    """A tensor with what `rank` sends to, or receives from, other members of an all_to_all.

    parts: (member, size) of the parts, in their order in the tensor.
    The logical tensor is a board of num_members * num_members cells, one per (receiver, sender).
    """
    pieces: list[Piece] = []
    start = 0
    for member, size in parts:
        receiver, sender = (member, rank) if sends else (rank, member)
        if size:
            place = (receiver * num_members + sender) * _CELL
            pieces.append(Piece((size,), start, (1,), place, (1,)))
        start += size
    side = "to" if sends else "from"
    members = ",".join(f"{member}:{size}" for member, size in parts)
    spec = f"exchange[{rank} {side} {members}]"
    return Placement(spec, (num_members * num_members * _CELL,), tuple(pieces))
