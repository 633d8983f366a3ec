"""An optimizer of which each data-parallel rank keeps a slice: ZeRO stage 1, written out.

All parameters lie one after the other in one flat tensor, padded to equal slices. A rank's
optimizer has its own slice: a view of the weights, or a master of them that it is copied from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tx.mesh import Mesh


class FlatSlice:
    """This rank's slice of the flattened parameters."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, has_master: bool = False) -> None:
        self.mesh, self.parameters = mesh, dict(model.named_parameters())
        ends = torch.tensor([p.numel() for p in self.parameters.values()]).cumsum(0).tolist()
        self.ends = dict(zip(self.parameters, ends, strict=True))
        self.flat = self.padded(lambda p: p.detach())
        for name, parameter in self.parameters.items():
            stretch = self.flat[self.ends[name] - parameter.numel() : self.ends[name]]
            parameter.data = stretch.view_as(parameter)
        own = self.flat.chunk(mesh.size("dp"))[mesh.index("dp")]
        self.start, self.size = mesh.index("dp") * len(own), len(own)
        self.own = nn.Parameter(own.clone() if has_master else own)

    def padded(self, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Something of all parameters in one flat tensor."""
        parts = [of(p).reshape(-1) for p in self.parameters.values()]
        missing = -sum(map(len, parts)) % self.mesh.size("dp")
        return torch.cat([*parts, parts[0].new_zeros(missing)])

    @property
    def elements(self) -> dict[str, tuple[int, int]]:
        """Which elements of which parameters lie in the slice."""
        found = {}
        for name, parameter in self.parameters.items():
            first = self.ends[name] - parameter.numel()
            start = max(self.start - first, 0)
            end = min(self.start + self.size - first, parameter.numel())
            if start < end:
                found[name] = (start, end)
        return found

    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks; each keeps its slice of the sum."""
        gradients = list(self.padded(lambda p: p.grad).chunk(self.mesh.size("dp")))
        self.own.grad = torch.empty_like(gradients[0])
        dist.reduce_scatter(self.own.grad, gradients, group=self.mesh.group("dp"))

    def gather_weights(self) -> None:
        """Put the slices of all ranks into the parameters."""
        slices = [torch.empty_like(self.own) for _ in range(self.mesh.size("dp"))]
        dist.all_gather(slices, self.own.detach(), group=self.mesh.group("dp"))
        self.flat.copy_(torch.cat(slices))
