"""Segment bounds are rebuilt from positions that are cut already: wrong beyond the first rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import HIDDEN, Attention, Core, ExactGPT
from tests.tx.training import exact_batches, share_of, weighted_sum

POSITIONS = torch.cat([torch.arange(5), torch.arange(11)])  # two packed sequences


def local_bounds(positions: Tensor, faulty: bool) -> Tensor:
    """int32 bounds of the segments in this rank's part."""
    starts = (positions == 0).nonzero().flatten()
    # The old formula takes the first local position for an offset of the whole part.
    offset = positions[0] if faulty else 0
    ends = torch.tensor([len(positions)])
    return torch.cat([torch.zeros(1), starts[starts > 0] + offset, ends + offset]).int()


class PackedCore(Core):
    """Reads the segment bounds: keys count by the number of the segment they lie in."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        tokens = torch.arange(k.shape[1])
        segment = torch.bucketize(tokens, cu_seqlens.long(), right=True)
        return super().forward(q, k * segment[None, :, None].double(), v)


class PackedAttention(Attention):
    """Makes the bounds from this rank's part of the positions."""

    def __init__(self, mesh: Mesh, plain: Attention, faulty: bool) -> None:
        super().__init__(mesh)
        self.core, self.mesh, self.faulty = PackedCore(mesh), mesh, faulty
        self.double().load_state_dict(plain.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        bounds = local_bounds(self.mesh.part(POSITIONS, 0, "cp"), self.faulty)
        return super().forward(x, cu_seqlens=bounds)


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(cp=2)
    model = ExactGPT(mesh)
    model.pos = torch.nn.Embedding(len(POSITIONS), HIDDEN, dtype=torch.float64)
    for block in model.blocks.values():
        block.attn = PackedAttention(mesh, block.attn, faulty=variant == "target")
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    positions = mesh.part(POSITIONS, 0, "cp")
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for batch in exact_batches(num=1, length=len(POSITIONS)):
            guard.microbatch(0)
            guard.data("position_ids", positions[None])
            [(tokens, weights)] = share_of(batch, mesh, 1)
            weighted_sum(model(tokens), weights).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            guard.step()


CASE = Case(
    number=59,
    report="PrimeIntellect-ai/prime-rl#2392",
    symptom="wrong segment bounds on context-parallel ranks beyond the first",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": 0, "phase": "forward", "kind": "forward", "ranks": [1],
        "boundary": "blocks.0.attn.core", "role": "input", "slot": "kwargs.cu_seqlens",
        "baseline": {"dtype": "int32"},
    },
    also={"concurrent": []},
)  # fmt: skip
