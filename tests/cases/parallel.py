"""TG on two tensor-parallel ranks, each with one head; outside of the regions a rank has its half
of the sequence. Only for pairs of this one layout: its sums are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.cases.models import HEADS, HIDDEN, Attention, TinyGPT
from tests.tx.mesh import Mesh
from tests.tx.regions import Enter, Gather, Leave


def rows(linear: nn.Linear, mesh: Mesh, num_parts: int = 1) -> nn.Linear:
    """This rank's rows of a column-parallel layer, from each of so many equal parts."""
    for tensor in (linear.weight, linear.bias):
        parts = tensor.data.unflatten(0, (num_parts, -1))
        tensor.data = mesh.part(parts, 1, "tp").flatten(0, 1).contiguous()
    return linear


def columns(linear: nn.Linear, mesh: Mesh) -> nn.Linear:
    """This rank's columns of a row-parallel layer, which has no bias here."""
    linear.weight.data = mesh.part(linear.weight.data, 1, "tp")
    linear.bias = None
    return linear


class ParallelAttention(nn.Module):
    def __init__(self, whole: Attention, mesh: Mesh) -> None:
        super().__init__()
        self.enter, self.leave = Enter(mesh), Leave(mesh)
        self.qkv, self.core = rows(whole.qkv, mesh, 3), whole.core
        self.proj = columns(whole.proj, mesh)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.qkv(self.enter(x)).unflatten(-1, (3, 1, HIDDEN // HEADS)).permute(2, 0, 3, 1, 4)
        )
        return self.leave(self.proj(self.core(*heads)[:, 0]))


class ParallelMLP(nn.Module):
    def __init__(self, whole: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.enter, self.leave = Enter(mesh), Leave(mesh)
        self.fc1, self.act = rows(whole.fc1, mesh), whole.act
        self.fc2 = columns(whole.fc2, mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.fc2(self.act(self.fc1(self.enter(x)))))


class ParallelGPT(TinyGPT):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        for block in self.blocks:
            block.attn = ParallelAttention(block.attn, mesh)
            block.mlp = ParallelMLP(block.mlp, mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.pos(torch.arange(tokens.shape[1])))
        x = self.mesh.part(x, 1, "tp")
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(Gather.apply(self.ln_f(x), self.mesh, "tp", 1, False))
