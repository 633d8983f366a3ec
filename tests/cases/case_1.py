"""Under sequence parallelism the final norm's gradient is not summed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ALONE, ExactGPT
from tests.tx.rules import rules_of
from tests.tx.training import exact_batches, sum_gradients, weighted_sum


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = ALONE if variant == "whole" else Mesh(tp=2, sp=True)
    model = ExactGPT(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)

    def is_summed(name: str) -> bool:
        return variant != "target" or name != "ln_f.weight"

    placed = {"layout": mesh.layout, "placements": rules_of(mesh)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        for tokens, weights in exact_batches(num=1):
            weighted_sum(model(tokens), weights).backward()
            sum_gradients(model, mesh, is_summed)
            optimizer.step()
            guard.step()


CASE = Case(
    number=1,
    report="NVIDIA/Megatron-LM#1446",
    symptom="the final norm's gradient differs on every tensor-parallel rank",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "all_reduce[tp] ln_f.weight.grad", "role": "input", "target": None,
    },
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "grad_sync", "ranks": [0, 1],
        "boundary": "ln_f.weight", "role": "grad",
    },
    whole={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "ln_f.weight", "role": "grad",
    },
    also={"concurrent": []},
    equal=(("--steps", "0", "--modules", "embed.*,pos.*,blocks.*,head.*"),),
)  # fmt: skip
