"""The largest activation of a quantiser is not agreed on over the tensor-parallel group."""

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
from tests.tx.training import exact_batches, sum_gradients, weighted_sum

LARGEST = 448.0  # of float8_e4m3fn


class QuantisedLinear(nn.Module):
    """Casts its input to float8 and back, scaled by what the steps before have seen."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("history", torch.ones(2, dtype=torch.float64))
        self.register_buffer("amax", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.amax.copy_(x.detach().abs().max())
        scale = LARGEST / self.history.max()
        quantised = (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        x = x + (quantised.to(x.dtype) / scale - x).detach()
        return x @ self.weight.T

    def remember(self, over_ranks: bool) -> None:
        """After a step: the largest input becomes part of the next scale."""
        if over_ranks:
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
        self.history.copy_(torch.stack([self.amax, self.history[0]]))


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(tp=2, sp=True)
    model = ExactGPT(mesh)
    for block in model.blocks.values():  # on this rank's half of the sequence, as the norms
        block.attn.qkv = QuantisedLinear(block.attn.qkv.weight.detach())
    quantised = [block.attn.qkv for block in model.blocks.values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 2**20)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, weights in exact_batches(num=2):
            optimizer.zero_grad()
            loss = weighted_sum(model(tokens), weights)
            for linear in quantised:
                linear.remember(over_ranks=variant != "target")
            loss.backward()
            sum_gradients(model, mesh)
            optimizer.step()
            guard.step()


CASE = Case(
    number=41,
    report="NVIDIA/Megatron-LM#442",
    symptom="FP8 training with large tensor parallelism diverges",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "kind": "collective", "ranks": [0, 1], "target": None,
        "boundary": "all_reduce[world] blocks.0.attn.qkv.amax",
    },
    waits="the target alone",
)  # fmt: skip
