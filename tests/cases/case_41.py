"""The largest activation of a quantiser is not agreed on over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import batches, next_token_loss
from tests.cases.parallel import ParallelGPT
from tests.tx.mesh import Mesh
from tests.tx.training import sum_gradients

LARGEST = 448.0  # of float8_e4m3fn
RULES = {"*.amax": ""}  # the ranks must agree on it


class QuantisedLinear(nn.Module):
    """Casts its input to float8 and back, scaled by what the steps before have seen.

    The input is this rank's half of the sequence; the halves are gathered afterwards.
    """

    def __init__(self, linear: nn.Linear, enter: nn.Module) -> None:
        super().__init__()
        self.enter, self.weight, self.bias = enter, linear.weight, linear.bias
        self.register_buffer("history", torch.ones(2))
        self.register_buffer("amax", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.amax.copy_(x.detach().abs().max())
        scale = LARGEST / self.history.max()
        quantised = (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        x = x + (quantised.to(x.dtype) / scale - x).detach()
        return nn.functional.linear(self.enter(x), self.weight, self.bias)

    def remember(self, over_ranks: bool) -> None:
        """After a forward: the largest input becomes part of the next scale."""
        if over_ranks:
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
        self.history.copy_(torch.stack([self.amax, self.history[0]]))


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(tp=2, sp=True)
    model = ParallelGPT(mesh)
    for block in model.blocks:
        block.attn.qkv = QuantisedLinear(block.attn.qkv, block.attn.enter)
        block.attn.enter = nn.Identity()
    quantised = [block.attn.qkv for block in model.blocks]
    optimizer = torch.optim.AdamW(model.parameters())
    placed = {"layout": mesh.layout, "placements": RULES}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        for tokens, labels in batches(num=2):
            optimizer.zero_grad()
            loss = next_token_loss(model(tokens), labels)
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
    # The largest input of block 0 is r1's own: there the missing reduction changes nothing.
    answer={
        "step": 0, "microbatch": None, "phase": "loss", "kind": "collective", "ranks": [0],
        "target": None, "boundary": "all_reduce[tp] blocks.0.attn.qkv.amax",
        "operator": "c10d.allreduce_", "role": "input", "baseline": {"shape": []},
    },
    also={"concurrent": []},
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "forward", "ranks": [0, 1],
        "boundary": "blocks.0.attn.qkv.amax", "role": "buffer",
    },
    equal=(("--steps", "0", "--modules", "blocks.*,head,embed", "--roles", "input,output,grad"),),
)  # fmt: skip
