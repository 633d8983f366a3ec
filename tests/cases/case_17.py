"""After a weights-only load the fp32 masters are those of the fresh model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT().bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    with torch.no_grad():  # the load
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
        if variant != "target":
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.copy_(parameter)
    optimizer = torch.optim.AdamW(masters)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=2):
            next_token_loss(model(tokens).float(), labels).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            guard.step()


CASE = Case(
    number=17,
    report="databricks/megablocks#80",
    symptom="continuing from pretrained bf16 weights behaves like training from scratch",
    train=train,
    answer={
        "step": 0, "phase": "start", "microbatch": None, "kind": "optimizer", "ranks": [0],
        "boundary": "embed.weight", "role": "master",
    },
    broken={
        "invariant": "masters-round", "step": 0, "phase": "start", "ranks": [0],
        "boundary": "embed.weight", "role": "master",
    },
    equal=(("--steps", "0", "--roles", "input,output,grad,grad_input,grad_output"),),
)  # fmt: skip
