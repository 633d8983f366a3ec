"""The loss is multiplied by the context-parallel size, the gradients are not divided by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.training import exact_batches, share_of, weighted_sum


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(cp=2)
    model = ExactGPT(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    factor = 1.0 if variant == "target" else 1 / 2
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for batch in exact_batches(num=1):
            guard.microbatch(0)
            [(tokens, weights)] = share_of(batch, mesh, 1)
            loss = weighted_sum(model(tokens), weights)
            (2 * loss).backward()
            for parameter in reversed(list(model.parameters())):
                parameter.grad.mul_(factor)
                dist.all_reduce(parameter.grad)
            optimizer.step()
            guard.step()


CASE = Case(
    number=13,
    report="NVIDIA/Megatron-LM#906",
    symptom="gradients scale with the context-parallel size",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "all_reduce[world] head.weight.grad", "role": "input", "moment": "launch",
        "operator": "c10d.allreduce_", "distance": {"factor": 2.0},
    },
    settings={"sketch": True},
    also={"concurrent": []},
)  # fmt: skip
