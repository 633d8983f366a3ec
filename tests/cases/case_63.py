"""Dropout in a tensor-parallel region draws another mask on every rank: that is by design."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ALONE, Core, ExactGPT
from tests.tx.rules import rules_of
from tests.tx.training import exact_batches, weighted_sum


class Dropout(nn.Module):
    """Half of the elements, twice as large."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.5) * 2


class DroppingCore(Core):
    def __init__(self, mesh: Mesh, drop: nn.Module) -> None:
        super().__init__(mesh)
        self.drop = drop

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.drop(super().forward(q, k, v))


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = ALONE if variant in ("baseline", "whole") else Mesh(tp=2)
    model = ExactGPT(mesh)
    dropping = variant in ("baseline", "target")
    for block in model.blocks.values():
        block.attn.core = DroppingCore(mesh, Dropout() if dropping else nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    rules = rules_of(mesh)
    placed = {"layout": mesh.layout, "placements": {"*.drop": rules["*.core"]} | rules}
    torch.manual_seed(mesh.index("tp"))  # as frameworks do in such a region
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        for tokens, weights in exact_batches(num=1):
            guard.microbatch(0)
            weighted_sum(model(tokens), weights).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=63,
    report="alibaba/Pai-Megatron-Patch#217",
    symptom="the loss of the first step grows with the tensor-parallel size",
    train=train,
    num_ranks=2,
    baseline_ranks=1,
    twin_of="whole",
    answer={
        "step": 0, "microbatch": 0, "phase": "forward", "kind": "rng", "ranks": [0, 1],
        "boundary": "blocks.0.attn.core.drop", "role": "output",
        "explanation": "The output 0[0] of blocks.0.attn.core.drop differs with equal inputs: "
        "a layout-dependent random op, ranks draw their own.",
    },
)  # fmt: skip
