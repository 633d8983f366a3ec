"""The loss of a micro-batch is divided by the number of micro-batches twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss

NUM_MICROBATCHES = 2


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    divisor = NUM_MICROBATCHES**2 if variant == "target" else NUM_MICROBATCHES
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for k, (tokens, labels) in enumerate(batches(num=NUM_MICROBATCHES)):
            guard.microbatch(k)
            loss = next_token_loss(model(tokens), labels) / divisor
            guard.observe("loss", loss, role="scalar", phase="loss")
            loss.backward()
        optimizer.step()
        guard.step()


CASE = Case(
    number=0,
    report="modelscope/ms-swift#10117",
    symptom="the gradients are too small by the number of micro-batches",
    train=train,
    settings={"sketch": True},
    answer={
        "step": 0, "microbatch": 0, "phase": "loss", "kind": "forward", "ranks": [0],
        "boundary": "loss", "role": "scalar", "distance": {"factor": 0.5},
    },
    also={"concurrent": []},
    equal=(("--steps", "0", "--roles", "output"),),
)  # fmt: skip
