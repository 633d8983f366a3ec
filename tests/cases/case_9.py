"""A parameter that only an early micro-batch uses is never synchronised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case


class Branches(nn.Module):
    """Each micro-batch takes one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.branch = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})

    def forward(self, x: Tensor, name: str) -> Tensor:
        return self.branch[name](self.trunk(x).relu())


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(dist.get_rank())
    with upguard_plugin.enable(model, optimizer, config, layout={"dp": 2}) as guard:
        optimizer.zero_grad()
        used: set[str] = set()
        for k, name in enumerate("ab"):
            guard.microbatch(k)
            if variant == "target":
                used.clear()  # the reset: only what the last forward used is remembered
            used |= {"trunk", f"branch.{name}"}
            model(torch.randn(4, 16, generator=draw), name).square().mean().backward()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.rpartition(".")[0] in used:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        guard.step()


CASE = Case(
    number=9,
    report="pytorch/pytorch#69031",
    symptom="parameters used only in an early micro-batch are never synchronised",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "all_reduce[dp] branch.a.weight.grad", "role": "input", "target": None,
    },
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "grad_sync", "ranks": [0, 1],
        "boundary": "branch.a.weight", "role": "grad",
    },
    equal=(("--steps", "0", "--modules", "branch.b.weight"),),
)  # fmt: skip
