"""The log shows twice the loss; the training is right."""

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
    logged = 0.0
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=2):
            optimizer.zero_grad()
            loss = next_token_loss(model(tokens), labels)
            loss.backward()
            optimizer.step()
            logged = loss.item() + (logged if variant == "target" else 0.0)
            guard.scalar("logged loss", logged)
            guard.step()


CASE = Case(
    number=61,
    report="NVIDIA/Megatron-LM#6237",
    symptom="logged loss doubles in the first iterations after resume",
    train=train,
    answer=None,
    also={
        "notes": [
            "program: 'baseline' against 'target'",
            "not used: logged loss differs from step 1 on (rank 0), and nothing behind it does",
        ],
    },
)
