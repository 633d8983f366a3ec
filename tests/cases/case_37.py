"""A kernel reads a strided gradient as if it were contiguous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import Attention, TinyGPT, batches, next_token_loss

makes_contiguous = True  # whether the caller hands a contiguous gradient over


class Scores(torch.autograd.Function):
    """Attention without softmax whose backward trusts the memory layout of its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return (q @ k.transpose(-2, -1)) @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        dense = torch.empty(grad.shape).stride()
        grad = grad.as_strided(grad.shape, dense)
        scores = grad @ v.transpose(-2, -1)
        mixed = (q @ k.transpose(-2, -1)).transpose(-2, -1)
        return scores @ k, scores.transpose(-2, -1) @ q, mixed @ grad


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Scores.apply(q, k, v)


class Contiguous(torch.autograd.Function):
    """The identity; its gradient is laid out as the caller likes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if makes_contiguous:
            return grad.contiguous()
        return grad.transpose(1, 2).contiguous().transpose(1, 2)


class Caller(Attention):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = Contiguous.apply(self.core(*(head.contiguous() for head in heads)))
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


def train(variant: str, config: Mapping[str, Any]) -> None:
    global makes_contiguous
    makes_contiguous = variant != "target"
    model = TinyGPT()
    for block in model.blocks:
        block.attn = Caller(Core())
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=1):
            guard.microbatch(0)
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=37,
    report="Dao-AILab/flash-attention#355",
    symptom="wrong gradients when the incoming gradient is strided",
    train=train,
    answer={
        "step": 0, "microbatch": 0, "phase": "backward", "kind": "backward", "ranks": [0],
        "boundary": "blocks.1.attn.core", "operator": "Core", "role": "grad_input",
        "inputs_equal": True,
    },
    also={"concurrent": []},
)  # fmt: skip
