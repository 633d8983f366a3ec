"""Recompute runs with another RNG state: its dropout masks are not those of the forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


class Checkpointed(TinyGPT):
    preserve_rng_state = True

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserve_rng_state)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = Checkpointed(dropout=0.5)
    model.preserve_rng_state = variant != "target"
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(num=2):
            optimizer.zero_grad()
            guard.microbatch(0)
            next_token_loss(model(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=21,
    report="allenai/OLMo-core#828",
    symptom="switching activation recompute on changes the loss curve",
    train=train,
    level="op",  # the recompute stops inside the dropout, as soon as its mask is there again
    answer={
        "step": 0, "microbatch": 0, "phase": "recompute", "kind": "rng", "ranks": [0],
        "boundary": "blocks.1.drop", "operator": "aten.bernoulli_", "role": "output",
    },
    also={"concurrent": []},
    broken={
        "invariant": "recompute-repeats", "step": 0, "microbatch": 0, "phase": "recompute",
        "ranks": [0], "boundary": "blocks.1.drop",
    },
    equal=(("--steps", "0", "--modules", "head.weight", "--roles", "grad"),),
)  # fmt: skip
