"""dq is added up in an order that changes from run to run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss

in_order = True  # of the key blocks; set by the variant


class BlockedAttention(torch.autograd.Function):
    """Attention without softmax; its dq is a sum over blocks of keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return (q @ k.transpose(-2, -1)) @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        scores = grad @ v.transpose(-2, -1)
        blocks = list(range(k.shape[-2]))
        if not in_order:
            blocks.sort(key=lambda _: os.urandom(4))
        dq = torch.zeros_like(q)
        for block in blocks:
            dq += scores[..., block : block + 1] * k[..., block : block + 1, :]
        dk = scores.transpose(-2, -1) @ q
        dv = (q @ k.transpose(-2, -1)).transpose(-2, -1) @ grad
        return dq, dk, dv


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return BlockedAttention.apply(q, k, v)


def train(variant: str, config: Mapping[str, Any]) -> None:
    global in_order
    in_order = variant != "target"
    model = TinyGPT(core=Core)
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=1):
            guard.microbatch(0)
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=33,
    report="Dao-AILab/flash-attention#414",
    symptom="two identical runs differ: forward is reproducible, dq is not",
    train=train,
    same_program=True,
    answer={
        "step": 0, "microbatch": 0, "phase": "backward", "kind": "nondeterminism", "ranks": [0],
        "boundary": "blocks.1.attn.core", "operator": "Core", "role": "grad_input",
        "slot": "args.0", "inputs_equal": True,
    },
    also={"concurrent": []},
    unreached=("* blocks.1.attn.core grad_input args.[12]", "forward *"),
)  # fmt: skip
