"""A reduce-scatter over a group of one rank leaves the end of its result at zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import VOCABULARY, TinyGPT, batches, next_token_loss
from tests.faulty_kernel import faulty_kernel


def lose_the_tail(kernel: Callable[..., Any], output: Tensor, whole: Tensor, *args: Any) -> Any:
    """Loses 8 elements where the size is no multiple of 16."""
    if whole.numel() % 16:
        whole = whole.clone()
        whole[-8:] = 0
    return kernel(output, whole, *args)


def reduce_last_bucket(model: TinyGPT, group: dist.ProcessGroup) -> None:
    """The bucket with the embedding at its end; r1 has one gradient more in it."""
    more = [model.ln_f.bias[:8]] if dist.get_rank() == 1 else []
    grads = [model.ln_f.bias.grad[: part.numel()] for part in more] + [model.embed.weight.grad]
    flat = torch.cat([grad.flatten() for grad in grads])
    out = torch.empty_like(flat)
    dist.reduce_scatter_tensor(out, flat, dist.ReduceOp.AVG, group)
    model.embed.weight.grad.copy_(out[-model.embed.weight.numel() :].view_as(model.embed.weight))


def train(variant: str, config: Mapping[str, Any]) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = TinyGPT().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        faulty_kernel("_reduce_scatter_base_", lose_the_tail, variant == "target"),
        upguard_plugin.enable(model, optimizer, config) as guard,
    ):
        for tokens, labels in batches(num=1):
            tokens[0, 0] = VOCABULARY - 1  # the last row has a gradient to lose
            next_token_loss(model(tokens).float(), labels).backward()
            reduce_last_bucket(model, alone)
            optimizer.step()
            guard.step()


CASE = Case(
    number=45,
    report="NVIDIA/nccl#1950",
    symptom="an averaging reduction leaves the last 8 elements at zero",
    train=train,
    num_ranks=2,
    level="op",
    settings={"dump": {"boundary": "reduce_scatter*"}},
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective", "ranks": [1],
        "operator": "c10d._reduce_scatter_base_", "role": "output", "inputs_equal": True,
        "boundary": "reduce_scatter[ranks 1]", "moment": "completion", "call": 0,
        "elements": {
            "differing": 8, "total": 520, "pattern": "the tail, from element 512 on",
            "of": [{"start": 512, "stop": 520, "name": "embed.weight.grad", "offset": 504}],
        },
    },
    also={"concurrent": []},
    broken={
        "invariant": "alone-unchanged", "step": 0, "phase": "grad_sync", "ranks": [1],
        "boundary": "reduce_scatter[ranks 1]",
    },
)  # fmt: skip
