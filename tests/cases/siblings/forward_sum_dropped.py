"""A row-parallel layer reduces a copy in forward and gives its own partial sum on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.regions import Leave
from tests.tx.training import exact_batches, weighted_sum


class Dropping(Leave):
    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x.detach().clone())
        return x.view_as(x)


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(tp=2)
    model = ExactGPT(mesh)
    if variant == "target":
        model.blocks["0"].attn.leave = Dropping(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, weights in exact_batches(num=1):
            guard.microbatch(0)
            weighted_sum(model(tokens), weights).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="deepspeedai/DeepSpeed#8357",
    symptom="a row-parallel layer gives a partial sum",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": 0, "phase": "forward", "kind": "collective", "ranks": [0, 1],
        "boundary": "blocks.0.attn.leave", "role": "output", "inputs_equal": True,
    },
)  # fmt: skip
