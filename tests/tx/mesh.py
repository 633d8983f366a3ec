"""How the ranks of one gloo job share a model: sizes, places and groups of the parallel axes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

AXES = ("tp", "cp", "dp", "pp")  # ranks count along tp first
EXPERT_AXES = ("etp", "ep", "edp", "pp")  # of the same ranks, where they hold experts


class Mesh:
    """This rank's place. Without sizes: one process that has everything.

    sp: outside of the tensor-parallel regions a rank has its part of the sequence. zigzag: a
    context-parallel rank has chunks r and 2n-1-r, else chunk r. etp, ep: ranks that share the
    tensors of one expert, and those that share out the experts; without both, an expert is cut over
    tp as everything else is.
    """

    def __init__(
        self, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, *,
        etp: int | None = None, ep: int = 1, sp: bool = False, zigzag: bool = False,
    ) -> None:  # fmt: skip
        self._sizes = (tp, cp, dp, pp)
        self.sp, self.zigzag = sp and tp > 1, zigzag
        self.has_expert_mesh = etp is not None or ep > 1
        self._of_experts = (tp if etp is None else etp, ep)
        self._rank = dist.get_rank() if prod(self._sizes) > 1 else 0

    def size(self, axis: str) -> int:
        return self._axes_of(axis)[axis]

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self._rank // self._below(axis) % self.size(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ along that axis only; None for all ranks of the job."""
        if self.size(axis) == prod(self._sizes):
            return None
        return _groups(prod(self._sizes), self._below(axis), self.size(axis))[self._rank]

    def rank_at(self, axis: str, index: int) -> int:
        """The global rank at another place along an axis."""
        return self._rank + (index - self.index(axis)) * self._below(axis)

    @property
    def layout(self) -> dict[str, object]:
        """What `enable` is told."""
        axes = dict.fromkeys((*AXES, *(EXPERT_AXES if self.has_expert_mesh else ())))
        return {axis: self.group(axis) or self.size(axis) for axis in axes if self.size(axis) > 1}

    @property
    def expert_axis(self) -> str:
        """The axis that cuts the tensors of an expert."""
        return "etp" if self.has_expert_mesh else "tp"

    @property
    def gathers_samples(self) -> bool:
        """Whether the ranks that share the experts have other samples: those of all of dp then."""
        return self.has_expert_mesh and prod(self._of_experts) > self.size("tp")

    @property
    def gathers_sequence(self) -> bool:
        """Whether they have other parts of the sequence: those of all of tp then."""
        return self.has_expert_mesh and self.sp and prod(self._of_experts) > 1

    def _axes_of(self, axis: str) -> dict[str, int]:
        """The sizes of the mesh that has the axis, in the order in which ranks count."""
        if axis in AXES:
            return dict(zip(AXES, self._sizes, strict=True))
        *dense, pp = self._sizes
        edp = prod(dense) // prod(self._of_experts)
        return dict(zip(EXPERT_AXES, (*self._of_experts, edp, pp), strict=True))

    def _below(self, axis: str) -> int:
        """How far apart the ranks of an axis are."""
        sizes = self._axes_of(axis)
        return prod(list(sizes.values())[: list(sizes).index(axis)])

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
def _groups(num_ranks: int, apart: int, size: int) -> dict[int, dist.ProcessGroup]:
    """The group of each rank of the job. Every rank calls this, and makes all groups."""
    groups = {}
    for rank in range(num_ranks):
        if rank // apart % size == 0:
            ranks = [rank + i * apart for i in range(size)]
            group = dist.new_group(ranks)
            groups |= dict.fromkeys(ranks, group)
    return groups
