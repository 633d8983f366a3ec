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
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.mesh.group("tp"))
        return grad, None


class SumForward(torch.autograd.Function):
    """g: the sum over the ranks; its gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=mesh.group("tp"))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


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
    """Into a tensor-parallel region."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh.sp:
            return Gather.apply(x, self.mesh, "tp", 1, True)
        return SumBackward.apply(x, self.mesh) if self.mesh.size("tp") > 1 else x


class Leave(Enter):
    """Out of a tensor-parallel region."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh.sp:
            return Scatter.apply(x, self.mesh, "tp", 1)
        return SumForward.apply(x, self.mesh) if self.mesh.size("tp") > 1 else x
