"""The optimizer's constructor already takes a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    if variant == "target":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=1):
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="OpGuard 30",
    symptom="the weights have decayed before the first step",
    train=train,
    answer={
        "step": 0, "microbatch": None, "phase": "start", "kind": "init", "ranks": [0],
        "boundary": "embed.weight", "role": "param",
    },
)  # fmt: skip
