"""What the ranks of a job do for the tests of `upguard check`: short trainings, some with a fault.

Each function runs on every rank and records to a folder; a fault is a name, "" is the clean twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import upguard_plugin

STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


def wrapped(kind: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """A model and the layout that a user would give with it."""
    model = network()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.005), {"dp": dist.get_world_size()}
    model[1] = nn.LayerNorm(32)  # FSDP does not take buffers apart
    mesh = None
    if kind == "fsdp named":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, {"dp": dist.get_world_size()} if mesh is not None else {}


def train(kind: str, folder: str, level: str = "module", fault: str = "") -> None:
    """A few steps of AdamW; the fault comes in step 1, on rank 1."""
    model, layout = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with recording(model, optimizer, folder, layout, level) as guard:
        for step in range(STEPS):
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            is_faulty = step == 1 and dist.get_rank() == 1
            if fault == "gradient" and is_faulty:
                flip_a_bit(next(iter(model.parameters())).grad)
            optimizer.step()
            if fault == "weight" and is_faulty:
                flip_a_bit(next(iter(model.parameters())).detach())
            optimizer.zero_grad()
            guard.step()


@contextmanager
def recording(
    model: nn.Module,
    optimizer: Any,
    folder: str,
    layout: Mapping[str, Any],
    level: str = "module",
    **options: Any,
) -> Iterator[upguard_plugin.Guard]:
    config = {"output_dir": folder, "level": level}
    with upguard_plugin.enable(model, optimizer, config, layout=layout, **options) as guard:
        yield guard


def flip_a_bit(tensor: Tensor) -> None:
    """The lowest mantissa bit of the first element."""
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
