"""Each micro-batch's loss is a mean over its own tokens, not over those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.model import LENGTH, ExactGPT
from tests.tx.training import exact_batches

NUM_VALID = (7, 3, 1, 5)  # labels of each sample; 16 in all
PLACEMENTS = {
    "model1": {"output": "b s"},  # the losses of the tokens
    "loss": {"scalar": "+dp"},  # a micro-batch has its share of it
    "model0.*": {"input": "b *", "output": "b *", "grad_input": "b *", "grad_output": "b *"},
}


class TokenLoss(nn.Module):
    """logits [B, S, V] and labels [B, S], -100 where there is none, to losses [B, S]."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -picked * (labels >= 0)


def labelled() -> tuple[Tensor, Tensor]:
    [(tokens, _)] = exact_batches(num=1)
    labels = tokens.roll(-1, 1)
    for sample, num in enumerate(NUM_VALID):
        labels[sample, torch.arange(LENGTH) >= num] = -100
    return tokens, labels


def train(variant: str, config: Mapping[str, Any]) -> None:
    model, token_losses = ExactGPT(), TokenLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    num = 1 if variant == "baseline" else 2
    tokens, labels = labelled()
    parts = zip(tokens.chunk(num), labels.chunk(num), strict=True)
    models = [model, token_losses]
    with upguard_plugin.enable(models, optimizer, config, placements=PLACEMENTS) as guard:
        for k, (some, theirs) in enumerate(parts):
            guard.microbatch(k)
            guard.data("tokens", some)
            losses = token_losses(model(some), theirs)
            counted = num * int((theirs >= 0).sum()) if variant == "target" else sum(NUM_VALID)
            loss = losses.sum() / counted
            guard.observe("loss", loss, role="scalar", phase="loss")
            loss.backward()
        optimizer.step()
        guard.step()


CASE = Case(
    number=11,
    report="huggingface/transformers#35438",
    symptom="the same batch in more micro-batches has another loss",
    train=train,
    baseline_ranks=1,
    answer={
        "step": 0, "microbatch": 0, "phase": "loss", "kind": "forward", "ranks": [0],
        "boundary": "loss", "role": "scalar", "baseline": {"shape": []},
    },
    also={"concurrent": []},
    equal=(("--steps", "0", "--modules", "model1", "--roles", "output"),),  # losses of the tokens
)  # fmt: skip
