"""Under sequence parallelism the final norm's gradient is not summed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.layouts import ExactGPT, exact_batches, sum_gradients, weighted_sum

REPLICATED = ("embed", "pos", "ln1", "ln2", "ln_f")  # each rank sees its half of the sequence

PLACEMENTS = {  # of the weights: cut by columns, by rows, and replicas
    "blocks.*.attn.qkv.weight": "o[tp] i",
    "blocks.*.mlp.fc1.weight": "o[tp] i",
    "blocks.*.attn.proj.weight": "o i[tp]",
    "blocks.*.mlp.fc2.weight": "o i[tp]",
    "blocks.*.ln?.weight": "h",
    "ln_f.weight": "h",
    "embed.weight": "v h",
    "pos.weight": "s h",
    "head.weight": "v h",
}


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = ExactGPT(tp=2, sp=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)

    def is_summed(name: str) -> bool:
        left_out = variant == "target" and name.startswith("ln_f")
        return any(part in REPLICATED for part in name.split(".")) and not left_out

    placed = {"layout": {"tp": 2}, "placements": PLACEMENTS}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        for tokens, weights in exact_batches(num=1):
            weighted_sum(model(tokens), weights).backward()
            sum_gradients(model, is_summed)
            optimizer.step()
            guard.step()


CASE = Case(
    number=1,
    report="NVIDIA/Megatron-LM#1446",
    symptom="the final norm's gradient differs on every tensor-parallel rank",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "boundary": "all_reduce[tp] ln_f.weight.grad", "role": "input", "target": None,
    },
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "grad_sync", "ranks": [0, 1],
        "boundary": "ln_f.weight", "role": "grad",
    },
    waits="TP1 against TP2",
)  # fmt: skip
