"""The learning rate schedule is stepped once per micro-batch."""

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
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    texts = iter(batches())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for _ in range(2):
            for k in range(2):
                guard.microbatch(k)
                tokens, labels = next(texts)
                next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            for _ in range(2 if variant == "target" else 1):
                schedule.step()
            optimizer.zero_grad()
            guard.step()


CASE = Case(
    number=51,
    report="starVLA/starVLA#210",
    symptom="learning rate decays too fast",
    train=train,
    answer={
        "step": 1, "phase": "start", "microbatch": None, "kind": "optimizer", "ranks": [0],
        "boundary": "optimizer.group0.lr", "role": "scalar",
    },
    also={"concurrent": []},
    equal=(("--steps", "0"), ("--steps", "1", "--roles", "grad,grad_input,grad_output")),
)  # fmt: skip
