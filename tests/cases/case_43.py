"""Expert gradients are divided by the wrong number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.cases.layouts import HIDDEN, ExactLinear, exact, weighted_sum

NUM_EXPERTS = 4


class AllToAll(torch.autograd.Function):
    """Tokens to the rank of their expert, or back; [NUM_EXPERTS, tokens, HIDDEN] on each side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return AllToAll.forward(ctx, grad)


class Experts(nn.Module):
    """Tokens go to all experts, weighed by the gate; each rank has two of the four."""

    def __init__(self) -> None:
        super().__init__()
        first = 2 * dist.get_rank()
        self.gate = ExactLinear(exact(NUM_EXPERTS, HIDDEN, seed=1))
        self.experts = nn.ModuleDict(
            {
                str(i): nn.ModuleDict(
                    {
                        "w1": ExactLinear(exact(HIDDEN, HIDDEN, seed=10 + i)),
                        "w2": ExactLinear(exact(HIDDEN, HIDDEN, seed=20 + i)),
                    }
                )
                for i in range(first, first + 2)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        arrived = AllToAll.apply(tokens.expand(NUM_EXPERTS, -1, -1)).unflatten(0, (2, 2))
        pairs = zip(self.experts.values(), arrived.unbind(1), strict=True)
        out = torch.stack([expert["w2"](expert["w1"](part).relu()) for expert, part in pairs], 1)
        back = AllToAll.apply(out.flatten(0, 1))
        return torch.einsum("te,eth->th", self.gate(tokens), back).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    x = exact(4, 8, HIDDEN, seed=30 + dist.get_rank())
    weights = exact(4, 8, HIDDEN, seed=40 + dist.get_rank())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        weighted_sum(model(x), weights).backward()
        dist.all_reduce(model.moe.gate.weight.grad, dist.ReduceOp.AVG)
        for parameter in model.moe.experts.parameters():
            parameter.grad.div_(1 if variant == "target" else 2)
        optimizer.step()
        guard.step()


CASE = Case(
    number=43,
    report="deepspeedai/DeepSpeed#6546",
    symptom="expert gradients are too large by the expert-parallel size",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0],
        "boundary": "moe.experts.0.w1.weight", "role": "grad", "inputs_equal": True,
    },
    also={"concurrent": [{"boundary": "moe.experts.2.w1.weight", "ranks": [1]}]},
    waits="one process against two",
)  # fmt: skip
