"""Padding of the vocabulary takes part in the sum of a vocabulary-parallel cross entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import ALONE, HIDDEN, ExactGPT, Linear
from tests.tx.regions import Enter, SumForward
from tests.tx.rules import rules_of
from tests.tx.training import exact_batches
from upguard_plugin.exact import make_exact

VOCABULARY = 33  # two ranks have 17 each, one of which is padding


def rows_of(mesh: Mesh) -> tuple[int, int]:
    """The first row of the vocabulary that a rank has, and how many."""
    num = -(-VOCABULARY // mesh.size("tp"))
    return mesh.index("tp") * num, num


class VocabularyEmbedding(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, (self.first, num) = mesh, rows_of(mesh)
        self.weight = nn.Parameter(torch.empty(num, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.first
        mine = (rows >= 0) & (rows < len(self.weight))
        out = nn.functional.embedding(rows * mine, self.weight) * mine[..., None]
        return SumForward.apply(out, self.mesh) if self.mesh.size("tp") > 1 else out


class Denominator(nn.Module):
    """The sum over the vocabulary, from each rank's part of it."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, partial: Tensor) -> Tensor:
        return SumForward.apply(partial, self.mesh) if self.mesh.size("tp") > 1 else partial


class CrossEntropyLoss(nn.Module):
    """Logits [B, S, a rank's V] to a loss: powers of two stand for the exponentials."""

    def __init__(self, mesh: Mesh, masks: bool) -> None:
        super().__init__()
        self.mesh, self.masks, self.denominator = mesh, masks, Denominator(mesh)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        first, num = rows_of(self.mesh)
        classes = torch.arange(first, first + num)
        seen = logits.detach()
        masked = seen.masked_fill(classes >= VOCABULARY, float("-inf"))
        largest = masked.amax(-1, keepdim=True)
        if self.mesh.size("tp") > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        powers = 2.0 ** ((masked if self.masks else seen) - largest).round().clamp(min=-8)
        powers = powers.masked_fill(masked == float("-inf"), 0) if self.masks else powers
        total = self.denominator(powers.sum(-1))
        picked = (logits * (classes == labels[..., None])).sum(-1)
        picked = SumForward.apply(picked, self.mesh) if self.mesh.size("tp") > 1 else picked
        return (total - picked).sum() / 32


class Model(nn.Module):
    def __init__(self, mesh: Mesh, masks: bool) -> None:
        super().__init__()
        self.gpt = ExactGPT(mesh)
        self.gpt.embed = VocabularyEmbedding(mesh)
        self.gpt.head = nn.Sequential(Enter(mesh), Linear(HIDDEN, rows_of(mesh)[1]))
        self.loss = CrossEntropyLoss(mesh, masks)
        make_exact(self, layout=mesh.layout, placements=placements_of(mesh))


def placements_of(mesh: Mesh) -> dict[str, Any]:
    """Those of TX, and of a vocabulary that is cut and padded."""
    logits, rules = "b s v[tp]~33", rules_of(mesh)
    return {
        "gpt.pos": rules["pos"],
        "gpt.embed.weight": "v[tp]~33 h",
        "gpt.head.1.weight": "v[tp]~33 h",
        "gpt.embed": {"input": "b s", "output": "b s h"},
        "gpt.head": {"input": "b s h", "output": logits, "grad_output": logits},
        "gpt.head.0": rules["*.enter"],
        "gpt.head.1": {"input": "b s h", "output": logits, "grad_output": logits},
        "gpt": {"input": "b s", "output": logits, "grad_output": logits},
        "loss": {"input": {"args.0": logits, "args.1": "b s"}},
        "loss.denominator": {"input": "b s +tp", "output": "b s"},
    } | rules


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = ALONE if variant == "baseline" else Mesh(tp=2)
    model = Model(mesh, masks=variant != "target")
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    placed = {"layout": mesh.layout, "placements": placements_of(mesh)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        for tokens, _ in exact_batches(num=1):
            guard.microbatch(0)
            guard.data("tokens", tokens)
            logits = model.gpt(tokens)
            model.loss(logits, tokens.roll(-1, 1)).backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=25,
    report="NVIDIA/Megatron-LM#1754",
    symptom="the loss has an offset where the vocabulary does not divide by the ranks",
    train=train,
    num_ranks=2,
    baseline_ranks=1,
    answer={
        "step": 0, "microbatch": 0, "phase": "loss", "kind": "forward", "ranks": [0, 1],
        "boundary": "loss.denominator", "role": "output",
    },
    also={"concurrent": []},
)  # fmt: skip
