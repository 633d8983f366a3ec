"""How the ranks of one gloo job share a model: sizes, places and groups of the parallel axes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

AXES = ("tp", "cp", "dp", "pp")  # ranks count along tp first


class Mesh:
    """This rank's place. Without sizes: one process that has everything.

    sp: outside of the tensor-parallel regions a rank has its part of the sequence. zigzag: a
    context-parallel rank has chunks r and 2n-1-r, else chunk r. ep: experts are shared by the
    ranks of dp.
    """

    def __init__(
        self, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, *,
        ep: bool = False, sp: bool = False, zigzag: bool = False,
    ) -> None:  # fmt: skip
        self._sizes = (tp, cp, dp, pp)
        self.ep, self.sp, self.zigzag = ep and dp > 1, sp and tp > 1, zigzag
        self._rank = dist.get_rank() if prod(self._sizes) > 1 else 0

    def size(self, axis: str) -> int:
        return self._sizes[AXES.index(axis)]

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        below = prod(self._sizes[: AXES.index(axis)])
        return self._rank // below % self.size(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ along that axis only; None for all ranks of the job."""
        if self.size(axis) == prod(self._sizes):
            return None
        return _groups(self._sizes, axis)[self._rank]

    def rank_at(self, axis: str, index: int) -> int:
        """The global rank at another place along an axis."""
        return self._rank + (index - self.index(axis)) * prod(self._sizes[: AXES.index(axis)])

    @property
    def layout(self) -> dict[str, object]:
        """What `enable` is told."""
        named = {axis: self.group(axis) or self.size(axis) for axis in AXES if self.size(axis) > 1}
        return named | ({"ep": named["dp"]} if self.ep else {})

    def part(self, whole: Tensor, dim: int, axis: str) -> Tensor:
        """This rank's part of a tensor that is cut along a dim."""
        return self.parts(whole, dim, axis)[self.index(axis)]

    def parts(self, whole: Tensor, dim: int, axis: str) -> list[Tensor]:
        """The parts of all ranks along an axis."""
        size = self.size(axis)
        if size == 1:
            return [whole]
        if not (axis == "cp" and self.zigzag):
            return [part.contiguous() for part in whole.chunk(size, dim)]
        chunks = whole.chunk(2 * size, dim)
        return [torch.cat([chunks[r], chunks[2 * size - 1 - r]], dim) for r in range(size)]

    def joined(self, parts: list[Tensor], dim: int, axis: str) -> Tensor:
        """The whole from the parts of all ranks along an axis."""
        if not (axis == "cp" and self.zigzag):
            return torch.cat(parts, dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([half[0] for half in halves] + [h[1] for h in reversed(halves)], dim)


@lru_cache
def _groups(sizes: tuple[int, ...], axis: str) -> dict[int, dist.ProcessGroup]:
    """The group of each rank of the job. Every rank calls this, and makes all groups."""
    at = AXES.index(axis)
    below, size = prod(sizes[:at]), sizes[at]
    groups = {}
    for rank in range(prod(sizes)):
        if rank // below % size == 0:
            ranks = [rank + i * below for i in range(size)]
            group = dist.new_group(ranks)
            groups |= dict.fromkeys(ranks, group)
    return groups
