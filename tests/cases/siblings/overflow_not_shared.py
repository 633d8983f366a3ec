"""Only the rank whose own gradients overflow skips its update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    model.register_buffer("overflow", torch.zeros(()))
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config, layout={"dp": 2}) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=1):
            next_token_loss(model(tokens), labels).backward()
            if dist.get_rank() == 0:
                model.head.bias.grad[3] = float("inf")
            finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
            model.overflow.fill_(not finite)
            if variant != "target":
                dist.all_reduce(model.overflow, dist.ReduceOp.MAX)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            if not model.overflow:
                optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="deepspeedai/DeepSpeed#8415",
    symptom="an update is skipped in silence: an overflow is not known to the other rank",
    train=train,
    num_ranks=2,
    # r0 knows of its own overflow, and misses nothing.
    answer={
        "step": 0, "kind": "collective", "ranks": [1], "role": "input", "target": None,
        "boundary": "all_reduce[dp] overflow",
    },
    also={"concurrent": []},
)  # fmt: skip
