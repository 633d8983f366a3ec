"""Synchronised gradients are clipped by value on one rank only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_value_

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config, layout={"dp": 2}) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=1):
            next_token_loss(model(tokens), labels).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            if variant != "target" or dist.get_rank() == 0:
                clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="deepspeedai/DeepSpeed#1801",
    symptom="replicas drift apart where clipping is active",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "clip", "kind": "optimizer", "ranks": [1],
        "boundary": "embed.weight", "role": "grad",
    },
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "optimizer", "ranks": [0, 1],
        "boundary": "embed.weight", "role": "optimizer_state",
    },
)  # fmt: skip
