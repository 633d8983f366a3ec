"""A training under DDP with torch's ZeroRedundancyOptimizer, run on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import upguard_plugin

STEPS = 3


def train(folder: str | None, fault: bool = False, views: bool = False) -> list[list[float]]:
    """A few steps; the weights afterwards. With the fault, step 1 leaves out the broadcasts.

    folder: None: not recorded. views: parameters lie in the optimizer's buckets.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, lr=0.1
    )
    config: dict[str, Any] = {"output_dir": folder} if folder else {"enabled": False}
    generator = torch.Generator().manual_seed(dist.get_rank())
    with upguard_plugin.enable(model, optimizer, config, layout={"dp": 2}) as guard:
        for step in range(STEPS):
            model(torch.randn(3, 4, generator=generator)).square().mean().backward()
            if fault and step == 1:
                optimizer._local_step()
            else:
                optimizer.step()
            optimizer.zero_grad()
            guard.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def overlapped(folder: str | None, level: str) -> list[list[float]]:
    """Steps that DDP's hook takes during backward; the weights afterwards."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1
    )
    with as_if_on_gpus():
        hook = hook_with_zero_step(allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    config: dict[str, Any] = {"output_dir": folder, "level": level}
    generator = torch.Generator().manual_seed(dist.get_rank())
    with upguard_plugin.enable(
        model, optimizer, config if folder else {"enabled": False}, layout={"dp": 2}
    ) as guard:
        for _ in range(STEPS + 2):  # torch leaves the first steps out
            model(torch.randn(3, 4, generator=generator)).square().mean().backward()
            model.zero_grad()
            guard.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


@contextmanager
def as_if_on_gpus() -> Iterator[None]:
    """torch does not make the hook for gloo, where several buckets may wait for each other."""
    found = dist.get_backend
    dist.get_backend = lambda *args: dist.Backend.NCCL
    try:
        yield
    finally:
        dist.get_backend = found


def saves_and_loads(folder: str) -> None:
    """A step, a load of what the optimizers of all ranks hold, a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    with upguard_plugin.enable(model, optimizer, {"output_dir": folder}, layout={"dp": 2}) as guard:
        for step in range(2):
            if step == 1:
                optimizer.consolidate_state_dict(to=0)
                whole = [optimizer.state_dict() if dist.get_rank() == 0 else None]
                dist.broadcast_object_list(whole, 0)
                optimizer.load_state_dict(whole[0])
            model(torch.ones(3, 4) + dist.get_rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
