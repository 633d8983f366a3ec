"""After a resume the loader is at the right place of the wrong permutation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import LENGTH, VOCABULARY, TinyGPT, next_token_loss

NUM_SAMPLES, BATCH, RESUMED_AFTER = 16, 2, 11  # 8 batches an epoch; 3 batches of epoch 1 are read


def permutations(seed: int):
    """Batches of sample numbers, epoch after epoch, shuffled by one generator."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(NUM_SAMPLES, generator=draw).split(BATCH)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    texts = torch.randint(
        0, VOCABULARY, (NUM_SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3)
    )
    order = permutations(7)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for step in range(RESUMED_AFTER + 2):
            if step == RESUMED_AFTER and variant == "target":
                order = permutations(7)  # rebuilt from the base seed: epoch 0's permutation again
                for _ in range(RESUMED_AFTER % (NUM_SAMPLES // BATCH)):
                    next(order)
            text = texts[next(order)]
            guard.microbatch(0)
            guard.data("input_ids", text[:, :-1])
            optimizer.zero_grad()
            next_token_loss(model(text[:, :-1]), text[:, 1:]).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=19,
    report="huggingface/accelerate#4195",
    symptom="after resume the loader is at the right position in the wrong shuffle",
    train=train,
    answer={
        "step": RESUMED_AFTER, "microbatch": 0, "phase": "data", "kind": "data", "ranks": [0],
        "boundary": "input_ids", "role": "data", "baseline": {"dtype": "int64"},
    },
    also={"concurrent": []},
)  # fmt: skip
