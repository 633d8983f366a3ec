"""A racing backward of an embedding overwrites two rows of its gradient, now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss

ROWS = slice(7, 9)
races = False  # in the next backward


class Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        whole = torch.zeros(ctx.shape).index_put_((tokens,), grad, accumulate=True)
        if races:
            whole[ROWS] += 1
        return whole, None


class Embedding(torch.nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return Embed.apply(self.weight, tokens)


def train(variant: str, config: Mapping[str, Any]) -> None:
    global races
    model = TinyGPT()
    model.embed.__class__ = Embedding
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for step, (tokens, labels) in enumerate(batches(num=2)):
            races = variant == "target" and step == 1
            guard.microbatch(0)
            optimizer.zero_grad()
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="OpGuard 1",
    symptom="a few rows of an embedding's gradient are wrong now and then",
    train=train,
    same_program=True,
    settings={"dump": {"boundary": "embed.weight", "steps": "1"}},
    answer={
        "step": 1, "microbatch": 0, "phase": "accumulate", "kind": "nondeterminism", "ranks": [0],
        "boundary": "embed.weight", "role": "grad", "inputs_equal": True,
        "elements": {"differing": 32, "pattern": "rows 7-8"},
    },
    also={"concurrent": []},
)  # fmt: skip
