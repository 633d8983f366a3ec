"""A load leaves the optimizer's moments right and sets its step counter to zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for step, (tokens, labels) in enumerate(batches(num=3)):
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
                for state in optimizer.state.values() if variant == "target" else ():
                    state["step"].zero_()
            optimizer.zero_grad()
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="OpGuard 20",
    symptom="the bias correction starts anew after a resume",
    train=train,
    answer={
        "step": 2, "microbatch": None, "phase": "start", "kind": "optimizer", "ranks": [0],
        "boundary": "embed.weight", "role": "optimizer_state", "slot": "step",
    },
)  # fmt: skip
