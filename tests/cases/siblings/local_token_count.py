"""Each context-parallel rank divides by the number of its own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.training import exact_batches, share_of, sum_gradients


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = Mesh(cp=2)
    model = ExactGPT(mesh)
    model.register_buffer("num_tokens", torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    with upguard_plugin.enable(model, optimizer, config, layout=mesh.layout) as guard:
        for batch in exact_batches(num=1):
            guard.microbatch(0)
            [(tokens, weights)] = share_of(batch, mesh, 1)
            weights = weights * (dist.get_rank() == 1)  # the first half of all texts is a prompt
            logits = model(tokens)
            model.num_tokens.fill_((weights != 0).any(-1).sum())
            if variant != "target":
                dist.all_reduce(model.num_tokens)
            ((logits * weights).sum() / model.num_tokens.clamp(min=1)).backward()
            sum_gradients(model, mesh)
            optimizer.step()
            guard.step()


CASE = Case(
    number=0,
    report="NVIDIA/Megatron-LM#7452",
    symptom="the loss is divided by a count of local tokens",
    train=train,
    num_ranks=2,
    # All tokens that count are r1's: its own number is that of all ranks.
    answer={
        "step": 0, "kind": "collective", "ranks": [0], "role": "input", "target": None,
        "boundary": "all_reduce[cp] num_tokens",
    },
    also={"concurrent": []},
    equal=(("--steps", "0", "--roles", "grad"),),
)  # fmt: skip
