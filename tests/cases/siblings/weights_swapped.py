"""An evaluation swaps averaged weights in and does not restore the live ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def evaluate(model: TinyGPT, average: dict[str, torch.Tensor], restores: bool) -> None:
    live = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average)
    if restores:
        model.load_state_dict(live)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    average = {name: value.clone() for name, value in model.state_dict().items()}
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for step, (tokens, labels) in enumerate(batches(num=2)):
            if step == 1:
                evaluate(model, average, restores=variant != "target")
            optimizer.zero_grad()
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="OpGuard 8",
    symptom="the validation of averaged weights overwrites the live ones",
    train=train,
    answer={
        "step": 1, "microbatch": None, "phase": "start", "kind": "optimizer", "ranks": [0],
        "boundary": "embed.weight", "role": "param",
    },
)  # fmt: skip
