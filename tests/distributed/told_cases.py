"""Cases of tests/cases, with what a user would say of their layout, for `upguard check`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import upguard_plugin
from tests.cases.case import record
from tests.cases.case_3 import First, Last, scatter_in_place
from tests.tx.mesh import Mesh
from tests.tx.model import HIDDEN, VOCABULARY
from tests.tx.training import exact_batches, run_microbatch


def told(module: str, variant: str, folder: str, options: dict[str, Any]) -> None:
    """Train one variant of a case as it stands."""
    with saying(**options):
        record(import_module(module).CASE, variant, Path(folder))


@contextmanager
def saying(**options: Any) -> Iterator[None]:
    """Inside, `upguard_plugin.enable` is given these too."""
    real = upguard_plugin.enable
    upguard_plugin.enable = partial(real, **options)
    try:
        yield
    finally:
        upguard_plugin.enable = real


def tied_embedding(folder: str, fault: bool) -> None:
    """Case 3 with its update: each data-parallel rank updates its shard, and hands it on.

    Four ranks: pipeline stage 0 is r0 and r1, stage 1 is r2 and r3. With the fault the gradient of
    the tied embedding is summed over the stages when it is reduced over the replicas already.
    """
    rank = dist.get_rank()
    mesh = Mesh(dp=2, pp=2)
    replicas, ends = mesh.group("dp"), mesh.group("pp")
    model = First() if rank < 2 else Last()
    flat = torch.zeros(2 * VOCABULARY * HIDDEN, dtype=torch.float64)
    tied = model.embed.weight if rank < 2 else model.head.weight
    in_order = (tied, model.middle) if rank < 2 else (model.middle, tied)
    for parameter, part in zip(in_order, flat.view(2, VOCABULARY, HIDDEN), strict=True):
        parameter.grad = part
    layout = {"dp": replicas, "pp": ends}
    names = [["embed.weight", "head.weight"]]
    config = {"output_dir": folder}
    with upguard_plugin.enable(model, None, config, layout=layout, tied=names) as guard:
        for tokens, weights in exact_batches(num=1, seed=rank % 2):
            run_microbatch(model, tokens, weights, mesh)
            if fault:
                scatter_in_place(flat, replicas)
            dist.all_reduce(tied.grad, group=ends)
            if not fault:
                scatter_in_place(flat, replicas)
            for place, parameter in enumerate(in_order):
                owner = 2 * (rank // 2) + place
                if rank == owner:
                    parameter.data.sub_(parameter.grad / 8)
                dist.broadcast(parameter.data, owner, group=replicas)
            guard.step()
