"""After a resume the expert optimizer carries the state of the dense one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case


class Mixture(nn.Module):
    """A gate and four experts of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        names = ("0", "1", "2", "3")
        self.experts = nn.ModuleDict(
            {
                name: nn.ModuleDict({"w1": nn.Linear(16, 16), "w2": nn.Linear(16, 16)})
                for name in names
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        outputs = [expert["w2"](expert["w1"](x).relu()) for expert in self.experts.values()]
        return sum(scores[:, i : i + 1] * output for i, output in enumerate(outputs))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # As many dense parameters as expert ones, of equal shapes: nothing raises on a wrong load.
        self.dense = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.moe = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.dense:
            x = x + layer(x).relu()
        return self.moe(x)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Model()
    dense = torch.optim.AdamW(model.dense.parameters())
    expert = torch.optim.AdamW(model.moe.experts.parameters())
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, 16, generator=draw)
    with upguard_plugin.enable(model, [dense, expert], config) as guard:
        for step, x in enumerate(inputs):
            if step == 2 and variant != "baseline":  # the run ends here, and another goes on
                saved = [copy.deepcopy(o.state_dict()) for o in (dense, expert)]
                dense.load_state_dict(saved[0])
                expert.load_state_dict(saved[0 if variant == "target" else 1])
            for optimizer in (dense, expert):
                optimizer.zero_grad()
            model(x).square().mean().backward()
            for optimizer in (dense, expert):
                optimizer.step()
            guard.step()


CASE = Case(
    number=15,
    report="NVIDIA/Megatron-LM#761",
    symptom="MoE loss after resume does not continue the curve",
    train=train,
    answer={
        "step": 2, "phase": "start", "microbatch": None, "kind": "optimizer", "ranks": [0],
        "boundary": "moe.experts.0.w1.weight", "role": "optimizer_state", "slot": "exp_avg",
    },
    equal=(
        ("--steps", "0-1"),
        ("--steps", "2", "--roles", "input,output,grad,grad_input,grad_output"),
        ("--steps", "2", "--modules", "dense.*,moe.gate*"),
    ),
)  # fmt: skip
