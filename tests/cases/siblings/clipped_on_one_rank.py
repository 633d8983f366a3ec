"""Replicated gradients are clipped on the first tensor-parallel rank only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.layouts import ExactGPT, exact_batches, rank, weighted_sum


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = ExactGPT(tp=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    skips = variant == "target" and rank() == 1
    clipped = [p for name, p in model.named_parameters() if not (skips and "ln" in name)]
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, weights in exact_batches(num=1):
            weighted_sum(model(tokens), weights).backward()
            for parameter in clipped:
                torch.nn.utils.clip_grad_value_([parameter], 1 / 4)
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="deepspeedai/DeepSpeed#1801",
    symptom="norm weights drift apart as soon as clipping is active",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "kind": "optimizer", "ranks": [1], "boundary": "blocks.0.ln1.weight",
        "role": "grad",
    },
)  # fmt: skip
