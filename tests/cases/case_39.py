"""The log-prob part of a loss turns its logits into probabilities in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches


class Model(TinyGPT):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.drop(self.embed(tokens) + self.pos(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.ln_f(x)), "hidden": x}


class LogProbInPlace(torch.autograd.Function):
    """Mean negative log-probability of the labels; leaves probabilities where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        chosen = logits.gather(-1, labels[..., None])
        loss = (logits.logsumexp(-1, keepdim=True) - chosen).mean()
        logits.copy_(logits.softmax(-1))
        ctx.save_for_backward(logits.clone(), labels)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        chosen = torch.zeros_like(probabilities).scatter_(-1, labels[..., None], 1.0)
        return grad * (probabilities - chosen) / labels.numel(), None


class LogProb(torch.nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return LogProbInPlace.apply(logits, labels)


class Entropy(torch.nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1).mean()


def train(variant: str, config: Mapping[str, Any]) -> None:
    model, logprob, entropy = Model(), LogProb(), Entropy()
    optimizer = torch.optim.AdamW(model.parameters())
    with upguard_plugin.enable([model, logprob, entropy], optimizer, config) as guard:
        for tokens, labels in batches(num=1):
            guard.microbatch(0)
            logits = model(tokens)["logits"]
            parts = [logprob, entropy] if variant == "target" else [entropy, logprob]
            loss = sum(part(logits, labels) for part in parts)
            guard.scalar("loss", loss)
            loss.backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=39,
    report="verl-project/verl#1672",
    symptom="entropy is wrong when computed after log-probs",
    train=train,
    answer={
        "step": 0, "microbatch": 0, "phase": "forward", "kind": "forward", "ranks": [0],
        "boundary": "model2", "role": "input", "slot": "args.0",
        "producer": {"boundary": "model0.head", "role": "output"},
    },
    also={"concurrent": []},
    equal=(("--steps", "0", "--modules", "model1", "--roles", "output"),),
)  # fmt: skip
