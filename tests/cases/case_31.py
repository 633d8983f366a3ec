"""The copy of a tied weight on the last pipeline stage is counted in the gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.training import exact_batches, run_microbatch
from upguard_plugin.exact import exact_values


def train(variant: str, config: Mapping[str, Any]) -> None:
    rank = dist.get_rank()
    mesh = Mesh(pp=2)
    model = ExactGPT(mesh)
    tied = model.embed.weight if rank == 0 else model.head.weight
    tied.data.copy_(exact_values("tied", tied.shape))
    shared = tied if rank == 1 and variant != "target" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for k, (tokens, weights) in enumerate(exact_batches(num=2)):
            guard.microbatch(k)
            run_microbatch(model, tokens, weights, mesh)
        dist.all_reduce(tied.grad)
        counted = [p.grad for p in model.parameters() if p is not shared]
        square = torch.stack([grad.square().sum() for grad in counted]).sum()
        guard.observe("squared grad norm of the stage", square, role="scalar", phase="clip")
        dist.all_reduce(square)
        for parameter in model.parameters():
            parameter.grad.mul_((1 / square.sqrt()).clamp(max=1))
        optimizer.step()
        guard.step()


CASE = Case(
    number=31,
    report="NVIDIA/Megatron-LM#7227",
    symptom="the global gradient norm is too large",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "clip", "kind": "optimizer", "ranks": [1],
        "boundary": "squared grad norm of the stage", "role": "scalar",
    },
    also={"concurrent": []},
)  # fmt: skip
