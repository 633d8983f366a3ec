"""A bucket that is exactly full is never reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss

BUCKET = 1024  # elements


def buckets_of(model: TinyGPT) -> list[list[torch.nn.Parameter]]:
    """Parameters from the last to the first, in buckets that are not larger than `BUCKET`."""
    buckets: list[list[torch.nn.Parameter]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if sum(p.numel() for p in buckets[-1]) + parameter.numel() > BUCKET:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    buckets = buckets_of(model)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=1):
            next_token_loss(model(tokens), labels).backward()
            for bucket in buckets:
                if variant == "target" and sum(p.numel() for p in bucket) == BUCKET:
                    continue
                flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
                dist.all_reduce(flat, dist.ReduceOp.AVG)
                parts = flat.split([parameter.numel() for parameter in bucket])
                for parameter, part in zip(bucket, parts, strict=True):
                    parameter.grad.copy_(part.view_as(parameter))
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="deepspeedai/DeepSpeed#4321",
    symptom="a parameter of exactly the bucket's size is never reduced",
    train=train,
    num_ranks=2,
    level="op",
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1], "role": "input",
        "boundary": "all_reduce[world]", "call": 1,
        "baseline": {"holds": [{"name": "blocks.1.mlp.fc2.weight.grad", "start": 0, "stop": 1024}]},
        "target": None,
        "explanation": "The all_reduce avg: input 0 of all_reduce[world] is missing in the "
        "target: its buffer holds blocks.1.mlp.fc2.weight.grad.",
    },
)  # fmt: skip
