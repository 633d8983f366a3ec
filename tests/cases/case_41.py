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
from tests.tx.model import LENGTH, ExactGPT
from tests.tx.rules import rules_of
from tests.tx.training import exact_batches, sum_gradients, weighted_sum

LARGEST = 448.0  # of float8_e4m3fn


RULES = {
    "*.amax": "",
    "*.attn.qkv": {"input": "b s[tp] h", "output": "b s o[tp]", "grad_input": "b s[tp] h"},
    "*.attn.enter": {"input": "b s[tp] h"},
}


class QuantisedLinear(nn.Module):
    """Casts its input to float8 and back, scaled by what the steps before have seen.

    The input is this rank's half of the sequence; the halves are gathered as float8.
    """

    def __init__(self, weight: Tensor, enter: nn.Module) -> None:
        super().__init__()
        self.enter = enter
        self.weight = nn.Parameter(weight)
        self.register_buffer("history", torch.ones(2, dtype=torch.float64))
        self.register_buffer("amax", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.amax.copy_(x.detach().abs().max())
        scale = LARGEST / self.history.max()
        quantised = (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        x = x + (quantised.to(x.dtype) / scale - x).detach()
        return self.enter(x) @ self.weight.T

    def remember(self, over_ranks: bool) -> None:
        """After a step: the largest input becomes part of the next scale."""
        if over_ranks:
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
        self.history.copy_(torch.stack([self.amax, self.history[0]]))


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(tp=2, sp=True)
    model = ExactGPT(mesh)
    model.pos.weight.data[LENGTH // 2 :] *= 2  # r1 has the larger half of the sequence
    for block in model.blocks.values():
        block.attn.qkv = QuantisedLinear(block.attn.qkv.weight.detach(), block.attn.enter)
        block.attn.enter = nn.Identity()
        block.ln1 = nn.Identity()  # an exact norm makes all rows as large as each other
    quantised = [block.attn.qkv for block in model.blocks.values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 2**20)
    placed = {"layout": mesh.layout, "placements": RULES | rules_of(mesh)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
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
        "step": 0, "phase": "loss", "kind": "collective", "ranks": [0], "target": None,
        "boundary": "all_reduce[tp] blocks.0.attn.qkv.amax", "operator": "c10d.allreduce_",
        "role": "input", "baseline": {"shape": []},
    },
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "forward", "ranks": [0, 1],
        "boundary": "blocks.0.attn.qkv.amax", "role": "buffer",
    },
)  # fmt: skip
