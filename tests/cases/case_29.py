"""Every tensor-parallel rank adds the whole bias before the sum over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ALONE, HIDDEN, Linear, MoE
from tests.tx.regions import Enter, SumForward
from tests.tx.rules import rules_of
from tests.tx.training import weighted_sum
from upguard_plugin.exact import exact_values, make_exact


class Expert(nn.Module):
    def __init__(self, mesh: Mesh, faulty: bool) -> None:
        super().__init__()
        self.mesh, self.faulty = mesh, faulty
        self.enter, self.act = Enter(mesh), nn.ReLU()
        self.w1, self.w2 = Linear(HIDDEN, 32, mesh, 0), Linear(32, HIDDEN, mesh, 1)
        self.b2 = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        out = self.w2(self.act(self.w1(self.enter(x))))
        out = out + self.b2 if self.faulty else out
        out = SumForward.apply(out, self.mesh) if self.mesh.size("tp") > 1 else out
        return out if self.faulty else out + self.b2


class Model(nn.Module):
    def __init__(self, mesh: Mesh, faulty: bool) -> None:
        super().__init__()
        self.moe = MoE(mesh)
        for name in self.moe.experts:
            self.moe.experts[name] = Expert(mesh, faulty)
        make_exact(self, layout=mesh.layout, placements=placements_of(mesh))
        for name, expert in self.moe.experts.items():
            expert.b2.data *= name == "2"

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


def placements_of(mesh: Mesh) -> dict[str, Any]:
    return {"x": "b s h", "*.b2": "h"} | rules_of(mesh, root="b s h")


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = ALONE if variant == "baseline" else Mesh(tp=2)
    model = Model(mesh, faulty=variant == "target")
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    x, weights = (exact_values(name, (4, 8, HIDDEN)) for name in ("x", "weights"))
    placed = {"layout": mesh.layout, "placements": placements_of(mesh)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        guard.microbatch(0)
        weighted_sum(model(x), weights).backward()
        optimizer.step()
        guard.step()


CASE = Case(
    number=29,
    report="pytorch/torchtitan#4245",
    symptom="an output bias counts once per tensor-parallel rank",
    train=train,
    num_ranks=2,
    baseline_ranks=1,
    answer={
        "step": 0, "microbatch": 0, "phase": "forward", "kind": "forward", "ranks": [0, 1],
        "boundary": "moe.experts.2", "role": "output",
    },
    also={"concurrent": []},
    equal=(("--steps", "0", "--modules", "moe.experts.[013]", "--roles", "output"),),
)  # fmt: skip
