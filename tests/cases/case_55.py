"""A pipeline stage that meets another sequence length drops the gradients it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.training import exact_batches, run_microbatch


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(pp=2)
    model = ExactGPT(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    microbatches = exact_batches(num=1) + exact_batches(num=1, length=4)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for k, (tokens, weights) in enumerate(microbatches):
            guard.microbatch(k)
            if k and variant == "target":  # the stage is built anew for the new shape
                optimizer.zero_grad(set_to_none=True)
            run_microbatch(model, tokens, weights, mesh)
        optimizer.step()
        guard.step()


CASE = Case(
    number=55,
    report="NVIDIA-NeMo/Automodel#3530",
    symptom="only the last micro-batch trains the model",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": 1, "phase": "accumulate", "kind": "backward", "ranks": [1],
        "boundary": "head.weight", "role": "grad", "moment": "before",
    },
    also={
        "concurrent": [],
        "per_rank": [
            {"ranks": [0], "boundary": "blocks.0.mlp.fc2.weight", "role": "grad", "microbatch": 1},
            {"ranks": [1], "boundary": "head.weight", "role": "grad", "microbatch": 1},
        ],
    },
    equal=(("--steps", "0", "--roles", "input,output,grad_input,grad_output"),),
)  # fmt: skip
