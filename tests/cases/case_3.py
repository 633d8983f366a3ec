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


def update_own_shard(weights: Tensor, grads: Tensor, group: dist.ProcessGroup) -> None:
    """Each member updates its shard, and gets the others'."""
    shards = list(weights.chunk(dist.get_world_size(group)))
    index = dist.get_rank(group)
    shards[index] -= grads.chunk(len(shards))[index] / 8
    dist.all_gather(shards, shards[index].clone(), group=group)


def train(variant: str, config: Mapping[str, Any]) -> None:
    rank, faulty = dist.get_rank(), variant.startswith("target")
    mesh = Mesh(dp=2, pp=2)
    # Told to be tied, both copies have the name of the first.
    tie = {"tied": [["embed.weight", "head.weight"]]} if variant.endswith("checked") else {}
    replicas, ends = mesh.group("dp"), mesh.group("pp")
    model = First() if rank < 2 else Last()
    tied = model.embed.weight if rank < 2 else model.head.weight
    in_order = (tied, model.middle) if rank < 2 else (model.middle, tied)
    weights_of, grads_of = (torch.zeros(2 * tied.numel(), dtype=torch.float64) for _ in range(2))
    parts = zip(weights_of.view(2, *SHAPE), grads_of.view(2, *SHAPE), strict=True)
    for parameter, (weight, grad) in zip(in_order, parts, strict=True):
        weight.copy_(parameter.data)
        parameter.data, parameter.grad = weight, grad
    with upguard_plugin.enable(model, None, config, layout=mesh.layout, **tie) as guard:
        for tokens, weights in exact_batches(num=1, seed=rank % 2):
            run_microbatch(model, tokens, weights, mesh)
            if faulty:
                scatter_in_place(grads_of, replicas)
            dist.all_reduce(tied.grad, group=ends)
            if not faulty:
                scatter_in_place(grads_of, replicas)
            update_own_shard(weights_of, grads_of, replicas)
            guard.step()


CASE = Case(
    number=3,
    report="NVIDIA/Megatron-LM#844",
    symptom="wrong gradient of a tied embedding with the distributed optimizer and pipelines",
    train=train,
    num_ranks=4,
    # The two stages do not wait for each other: neither is first.
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective", "ranks": [2, 3],
        "boundary": "all_reduce[pp] head.weight.grad", "operator": "c10d.allreduce_",
        "role": "input", "moment": "launch",
    },
    also={
        "concurrent": [
            {
                "step": 0, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
                "boundary": "all_reduce[pp] embed.weight.grad",
            },
        ],
    },
    checked_with_more=True,
    broken={
        "invariant": "tied-agree", "step": 0, "boundary": "embed.weight", "role": "param",
        "ranks": [0, 2],
    },
)  # fmt: skip
