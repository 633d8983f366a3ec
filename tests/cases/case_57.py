"""The result of a sparse all-reduce lies in a new tensor, which the caller does not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import upguard_plugin
from tests.cases.case import Case


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    tokens = torch.tensor([[1, 1, 2, 3 + dist.get_rank()]])  # repeated: not coalesced
    with upguard_plugin.enable(model, optimizer, config) as guard:
        model(tokens).square().sum().backward()
        reduced = model.embed.weight.grad.clone()
        dist.all_reduce(reduced)
        if variant != "target":
            model.embed.weight.grad = reduced.coalesce() if variant == "twin" else reduced
        optimizer.step()
        guard.step()


CASE = Case(
    number=57,
    report="pytorch/pytorch#31413",
    symptom="a sparse gradient all-reduce returns unreduced values",
    train=train,
    num_ranks=2,
    # The twin is the second pair of the report: the same values, coalesced.
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "embed.weight", "role": "grad",
    },
    also={"concurrent": []},
)  # fmt: skip
