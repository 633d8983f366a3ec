"""A transfer leaves some elements of a flat buffer at zero, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss
from tests.faulty_kernel import faulty_kernel

LOST = slice(600, 700, 10)


def lose(kernel: Callable[..., Any], tensors: list[Tensor], *args: Any) -> Any:
    """After an all-reduce some elements are zero."""
    if tensors[0].numel() > LOST.stop:  # a rank that sends nothing there gets what others send
        tensors[0][LOST] = 0
    return kernel(tensors, *args)


def train(variant: str, config: Mapping[str, Any]) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    loses = variant == "target" and dist.get_rank() == 1
    bucket = [model.head.weight, model.blocks[1].mlp.fc2.weight]
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=1):
            next_token_loss(model(tokens), labels).backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            with faulty_kernel("allreduce_", lose, loses):
                dist.all_reduce(flat, dist.ReduceOp.AVG, alone)
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="pytorch/pytorch#96600",
    symptom="a transfer between devices loses data",
    train=train,
    num_ranks=2,
    level="op",
    settings={"dump": {"boundary": "all_reduce*"}},
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [1], "role": "output",
        "boundary": "all_reduce[ranks 1]", "inputs_equal": True,
        "elements": {
            "differing": 10, "pattern": "every 10th element from 600 to 690",
            "of": [
                {"name": "blocks.1.mlp.fc2.weight.grad", "start": 600, "stop": 691, "offset": 88},
            ],
        },
    },
    also={"concurrent": []},
    broken={"invariant": "alone-unchanged", "step": 0, "ranks": [1]},
)  # fmt: skip
