"""What ranks do to each other's tensors inside of a forward: autograd functions and modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tx.mesh import Mesh


class SumBackward(torch.autograd.Function):
    """f: the identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str = "tp") -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.mesh.group(ctx.axis))
        return grad, None, None


class SumForward(torch.autograd.Function):
    """g: the sum over the ranks; its gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str = "tp") -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=mesh.group(axis))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class Take(torch.autograd.Function):
    """This rank's part of what every rank has; its gradient is the whole again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return mesh.part(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(grad, ctx.mesh, ctx.axis, ctx.dim), None, None, None


class Gather(torch.autograd.Function):
    """The whole from the parts along a dim. Its gradients are summed, or each takes its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Mesh, axis: str, dim: int, sums: bool) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim, ctx.sums = mesh, axis, dim, sums
        return _gathered(part, mesh, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        take = _scattered if ctx.sums else Mesh.part
        return take(ctx.mesh, grad, ctx.dim, ctx.axis), None, None, None, None


class Scatter(torch.autograd.Function):
    """The sum over the ranks, of which each keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return _scattered(mesh, x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(grad, ctx.mesh, ctx.axis, ctx.dim), None, None, None


def _gathered(part: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    parts = [torch.empty_like(part.contiguous()) for _ in range(mesh.size(axis))]
    dist.all_gather(parts, part.contiguous(), group=mesh.group(axis))
    return mesh.joined(parts, dim, axis)


def _scattered(mesh: Mesh, whole: Tensor, dim: int, axis: str) -> Tensor:
    parts = mesh.parts(whole, dim, axis)
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=mesh.group(axis))
    return own


class Enter(nn.Module):
    """Into a region that is cut over an axis: all have the whole, and each a share of its gradient.

    sp: in front of it each rank has its part of the sequence.
    """

    def __init__(self, mesh: Mesh, axis: str = "tp", *, sp: bool = False) -> None:
        super().__init__()
        self.mesh, self.axis, self.sp = mesh, axis, sp

    def forward(self, x: Tensor) -> Tensor:
        if self.sp:
            return Gather.apply(x, self.mesh, self.axis, 1, True)
        return SumBackward.apply(x, self.mesh, self.axis) if self.is_cut else x

    @property
    def is_cut(self) -> bool:
        return self.mesh.size(self.axis) > 1


class Leave(Enter):
    """Out of such a region."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sp:
            return Scatter.apply(x, self.mesh, self.axis, 1)
        return SumForward.apply(x, self.mesh, self.axis) if self.is_cut else x


def to_experts(x: Tensor, mesh: Mesh) -> Tensor:
    """The tokens of all ranks that share the experts; each rank adds to their gradients."""
    if mesh.gathers_samples:
        x = Gather.apply(x, mesh, "dp", 0, False)
    if mesh.gathers_sequence:
        x = Gather.apply(x, mesh, "tp", 1, False)
    return SumBackward.apply(x, mesh, "ep") if mesh.size("ep") > 1 else x


def from_experts(x: Tensor, mesh: Mesh) -> Tensor:
    """What all experts made of this rank's tokens."""
    if mesh.size("ep") > 1:
        x = SumForward.apply(x, mesh, "ep")
    if mesh.gathers_sequence:
        x = Take.apply(x, mesh, "tp", 1)
    return Take.apply(x, mesh, "dp", 0) if mesh.gathers_samples else x
