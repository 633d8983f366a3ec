"""Gradients are added up in bfloat16 instead of float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import upguard_plugin
from tests.cases.case import Case


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = nn.Linear(8, 8, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    value = 1.0 if dist.get_rank() == 0 else 2.0**-9
    with upguard_plugin.enable(model, optimizer, config) as guard:
        model(torch.full((1, 8), value, dtype=torch.bfloat16)).sum().backward()
        flat = model.weight.grad.flatten()
        wire = flat if variant == "target" else flat.float()
        dist.all_reduce(wire)
        model.weight.grad = wire.bfloat16().view_as(model.weight)
        optimizer.step()
        guard.step()


CASE = Case(
    number=65,
    report="pytorch/pytorch#106395",
    symptom="training is unstable on many ranks with bf16 gradient reduction",
    train=train,
    num_ranks=4,
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective",
        "ranks": [0, 1, 2, 3],
        "call": 0, "boundary": "all_reduce[world]", "operator": "c10d.allreduce_", "role": "input",
        "baseline": {"dtype": "float32"}, "target": {"dtype": "bfloat16"},
    },
    also={"concurrent": []},
    breaks_nothing=True,
)  # fmt: skip
