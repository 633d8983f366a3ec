"""One rank's hardware flips a bit, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss

FLIPPED_STEP = 3


class Unstable(torch.nn.Linear):
    """A linear layer whose next output has one wrong bit where it is told so."""

    flips = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.flips:
            with torch.no_grad():
                out.view(torch.int32).view(-1)[5] ^= 1 << 12
        return out


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    fc1 = model.blocks[1].mlp.fc1
    fc1.__class__ = Unstable
    optimizer = torch.optim.AdamW(model.parameters())
    replica = DistributedDataParallel(model)
    with upguard_plugin.enable(replica, optimizer, config) as guard:
        texts = batches(seed=dist.get_rank(), num=FLIPPED_STEP + 2)
        for step, (tokens, labels) in enumerate(texts):
            fc1.flips = variant == "target" and step == FLIPPED_STEP and dist.get_rank() == 1
            guard.microbatch(0)
            optimizer.zero_grad()
            next_token_loss(replica(tokens), labels).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=47,
    report="pytorch/pytorch#84803",
    symptom="wrong numbers now and then on one device",
    train=train,
    num_ranks=2,
    same_program=True,
    answer={
        "step": FLIPPED_STEP, "microbatch": 0, "phase": "forward", "kind": "nondeterminism",
        "ranks": [1], "boundary": "blocks.1.mlp.fc1", "role": "output", "inputs_equal": True,
        "elements": {"differing": 1, "pattern": "one element"},
    },
    settings={"dump": {"boundary": "blocks.1.mlp.fc1", "steps": str(FLIPPED_STEP)}},
    also={"concurrent": []},
)  # fmt: skip
