"""After a resume every rank draws from the random stream of the rank that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case

RESUMED_STEP = 2


class Gate(nn.Linear):
    """A router whose scores get noise from a generator of its rank's own."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.expert = torch.Generator().manual_seed(dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x), 4, generator=self.expert)
        return (super().forward(x) + noise).softmax(-1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        return sum(scores[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


def saved_state(rank: int, draws: int) -> Tensor:
    """The state that a rank's generator has after so many draws."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(draws // 16):
        torch.randn(4, 4, generator=generator)
    return generator.get_state()


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    with upguard_plugin.enable(model, optimizer, config, layout={"ep": 2}) as guard:
        for step in range(RESUMED_STEP + 1):
            if step == RESUMED_STEP and variant != "baseline":  # saved by a rank, and loaded
                saver = 0 if variant == "target" else dist.get_rank()
                model.moe.gate.expert.set_state(saved_state(saver, draws=4 * 4 * RESUMED_STEP))
            optimizer.zero_grad()
            model(torch.randn(4, 16, generator=draw)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            optimizer.step()
            guard.step()


CASE = Case(
    number=23,
    report="NVIDIA/Megatron-LM#6858",
    symptom="after a resume most ranks draw other random numbers",
    train=train,
    num_ranks=2,
    answer={
        "step": RESUMED_STEP, "microbatch": None, "phase": "start", "kind": "rng", "ranks": [1],
        "boundary": "rng.moe.gate.expert", "role": "rng",
    },
    broken={
        "invariant": "streams-differ", "step": RESUMED_STEP, "phase": "start", "ranks": [0, 1],
        "boundary": "rng.moe.gate.expert", "role": "rng",
    },
    also={"concurrent": []},
    then={"phase": "forward", "boundary": "moe.gate", "role": "output"},
)  # fmt: skip
