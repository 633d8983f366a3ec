"""Gradients are reduced over a group that has one rank only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def train(variant: str, config: Mapping[str, Any]) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    group = alone if variant == "target" else None
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=1):
            next_token_loss(model(tokens), labels).backward()
            for parameter in reversed(list(model.parameters())):
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group)
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="ByteDance-Seed/VeOmni#1115",
    symptom="the replicas drift apart",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "all_reduce[world] head.bias.grad", "role": "input",
    },
)  # fmt: skip
