"""Expert gradients are divided by the wrong number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ALONE, HIDDEN, MoE
from tests.tx.rules import rules_of, samples_of
from tests.tx.training import weighted_sum
from upguard_plugin.exact import exact_values, make_exact

NUM_SAMPLES = 4  # of a rank


class Model(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.moe = MoE(mesh)
        make_exact(self, layout=mesh.layout, placements=rules_of(mesh))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = ALONE if variant == "whole" else Mesh(dp=2, ep=2)
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    shape = (2 * NUM_SAMPLES, 8, HIDDEN)
    x, weights = (mesh.part(exact_values(name, shape), 0, "dp") for name in ("x", "weights"))
    spec = f"{samples_of(mesh)} s h"
    placed = {"layout": mesh.layout, "placements": {"x": spec} | rules_of(mesh, root=spec)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        weighted_sum(model(x), weights).backward()
        for name, parameter in model.named_parameters():
            if variant == "whole" or "experts" in name:
                parameter.grad.div_(1 if variant == "target" else 2)
            else:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        guard.step()


CASE = Case(
    number=43,
    report="deepspeedai/DeepSpeed#6546",
    symptom="expert gradients are too large by the expert-parallel size",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective", "ranks": [0],
        "boundary": "moe.experts.0.w1.weight", "role": "grad", "inputs_equal": True,
        "distance": {"factor": 2.0},
    },
    settings={"sketch": True},
    also={"concurrent": [{"boundary": "moe.experts.2.w1.weight", "ranks": [1]}]},
    whole={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0],
        "boundary": "moe.experts.0.w1.weight", "role": "grad",
    },
    equal=(("--steps", "0", "--modules", "moe.gate.weight"),),
)  # fmt: skip
