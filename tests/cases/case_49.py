"""A cast of the whole model rounds a float32 buffer; a cast back does not bring the bits back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import HIDDEN, LENGTH, TinyGPT, batches, next_token_loss


class Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        powers = torch.arange(0, HIDDEN, 2) / HIDDEN
        self.register_buffer("inv_freq", 10000.0**-powers, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(LENGTH)[:, None] * self.inv_freq
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Model(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(self.rotary(x))


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Model()
    if variant == "target":
        model.bfloat16()
        model.rotary.inv_freq = model.rotary.inv_freq.float()
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=1):
            next_token_loss(model(tokens).float(), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=49,
    report="NVIDIA-NeMo/Automodel#2549",
    symptom="long-context logits differ from the reference",
    train=train,
    answer={
        "step": 0, "microbatch": None, "phase": "start", "kind": "init", "ranks": [0],
        "boundary": "rotary.inv_freq", "role": "buffer", "baseline": {"dtype": "float32"},
        "target": {"dtype": "float32"},
    },
    also={"concurrent": []},
    then={"phase": "forward", "boundary": "rotary", "role": "output"},
)  # fmt: skip
