"""Two implementations of AdamW: one decays the weights after the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


class HandmadeAdamW(torch.optim.Optimizer):
    decays_first = True

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 0.01)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                decay = 1 - group["lr"] * group["weight_decay"]
                if self.decays_first:
                    parameter.mul_(decay).sub_(update, alpha=group["lr"])
                else:
                    parameter.sub_(update, alpha=group["lr"]).mul_(decay)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = HandmadeAdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    optimizer.decays_first = variant != "target"
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=1):
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=53,
    report="bitsandbytes-foundation/bitsandbytes#2010",
    symptom="two AdamW implementations drift",
    train=train,
    answer={
        "step": 0, "phase": "optimizer", "microbatch": None, "kind": "optimizer", "ranks": [0],
        "boundary": "embed.weight", "role": "param", "inputs_equal": True,
    },
    also={"concurrent": []},
    equal=(
        ("--steps", "0", "--roles", "optimizer_state"),
        ("--steps", "0", "--roles", "param", "--modules", "*.ln?,ln_f,*.bias"),
    ),
)  # fmt: skip
