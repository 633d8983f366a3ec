"""An all-reduce helper reduces a contiguous copy and returns the tensor it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.rules import rules_of
from tests.tx.training import exact_batches, weighted_sum


def all_reduced(x: Tensor) -> Tensor:
    """The helper of the report."""
    dist.all_reduce(x.contiguous())
    return x


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, contiguous: bool) -> Tensor:
        ctx.contiguous = contiguous
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, None]:
        grad_SBH = grad_BSH.transpose(0, 1)
        if ctx.contiguous:
            grad_SBH = grad_SBH.clone(memory_format=torch.contiguous_format)
        return all_reduced(grad_SBH).transpose(0, 1), None


class Enter(nn.Module):
    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        self.contiguous = contiguous

    def forward(self, x: Tensor) -> Tensor:
        return CopyToRegion.apply(x, self.contiguous)


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(tp=2)
    model = ExactGPT(mesh)
    for block in model.blocks.values():
        block.mlp.enter = Enter(contiguous=variant != "target")
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    placed = {"layout": mesh.layout, "placements": rules_of(mesh)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        for tokens, weights in exact_batches(num=1):
            guard.microbatch(0)
            weighted_sum(model(tokens), weights).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=7,
    report="NVIDIA/Megatron-LM#5337",
    symptom="a tensor-parallel all-reduce helper returns the tensor unreduced",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": 0, "phase": "backward", "kind": "collective", "ranks": [0, 1],
        "boundary": "blocks.1.mlp.enter", "role": "grad_input", "inputs_equal": True,
        "explanation": "The grad_input args.0 of blocks.1.mlp.enter differs with equal inputs: "
        "the result of the collective in its call is unused.",
    },
    also={"concurrent": []},
    broken={
        "invariant": "replicas-agree", "step": 0, "microbatch": 0, "phase": "backward",
        "boundary": "blocks.1.mlp.enter", "role": "grad_input", "ranks": [0, 1],
    },
)  # fmt: skip
