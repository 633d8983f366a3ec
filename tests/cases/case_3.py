"""A tied embedding's gradient is summed over the stages after the data-parallel reduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.tx.mesh import Mesh
from tests.tx.model import HIDDEN, VOCABULARY
from tests.tx.training import exact_batches, run_microbatch
from upguard_plugin.exact import exact_values

# Four ranks: pipeline stage 0 is r0 and r1, stage 1 is r2 and r3; r0 and r2 feed each other.
SHAPE = (VOCABULARY, HIDDEN)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, _weight=exact_values("tied", SHAPE))
        self.middle = nn.Parameter(exact_values("first", SHAPE))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + nn.functional.embedding(tokens, self.middle)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Parameter(exact_values("last", SHAPE))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = nn.Parameter(exact_values("tied", SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + x @ self.middle.T


def scatter_in_place(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Reduce a flat buffer over a group; each member has its shard of the sum in its place."""
    shards = list(flat.chunk(dist.get_world_size(group)))
    own = torch.empty_like(shards[0])
    dist.reduce_scatter(own, [shard.clone() for shard in shards], group=group)
    shards[dist.get_rank(group)].copy_(own)


def train(variant: str, config: Mapping[str, Any]) -> None:
    rank = dist.get_rank()
    mesh = Mesh(dp=2, pp=2)
    replicas, ends = mesh.group("dp"), mesh.group("pp")
    model = First() if rank < 2 else Last()
    flat = torch.zeros(2 * VOCABULARY * HIDDEN, dtype=torch.float64)
    parts = flat.view(2, VOCABULARY, HIDDEN).unbind()
    tied = model.embed.weight if rank < 2 else model.head.weight
    in_order = (tied, model.middle) if rank < 2 else (model.middle, tied)
    for parameter, part in zip(in_order, parts, strict=True):
        parameter.grad = part
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, weights in exact_batches(num=1, seed=rank % 2):
            run_microbatch(model, tokens, weights, mesh)
            if variant == "target":
                scatter_in_place(flat, replicas)
            dist.all_reduce(tied.grad, group=ends)
            if variant != "target":
                scatter_in_place(flat, replicas)
            guard.step()


CASE = Case(
    number=3,
    report="NVIDIA/Megatron-LM#844",
    symptom="wrong gradient of a tied embedding with the distributed optimizer and pipelines",
    train=train,
    num_ranks=4,
    # On r0 and r3 the embedding lies in the shard that is reduced already.
    answer={
        "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [3],
        "boundary": "all_reduce[ranks 1,3] head.weight.grad", "role": "input",
    },
    also={"concurrent": [{"boundary": "all_reduce[ranks 0,2] embed.weight.grad", "ranks": [0]}]},
    waits="the target alone",
)  # fmt: skip
