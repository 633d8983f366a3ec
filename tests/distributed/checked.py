"""What the ranks of a job do for the tests of `upguard check`: short trainings, some with a fault.

Each function runs on every rank and records to a folder; a fault is a name, "" is the clean twin.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import upguard_plugin

STEPS = 3
STATE = ("param", "grad", "optimizer_state")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


def wrapped(kind: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """A model and the layout that a user would give with it."""
    model = network()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.005), {"dp": dist.get_world_size()}
    model[1] = nn.LayerNorm(32)  # FSDP does not take buffers apart
    if kind.startswith("fsdp1"):
        cpu = {"device_id": torch.device("cpu"), "use_orig_params": kind != "fsdp1 flat"}
        model[0] = FullyShardedDataParallel(model[0], **cpu)
        return FullyShardedDataParallel(model, **cpu), {"dp": dist.get_world_size()}
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
    if fault == "gathered" and dist.get_rank() == 1:
        model[3].register_forward_pre_hook(spoil_weight)  # behind FSDP's, before ours
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


def checkpointed(kind: str, folder: str, fault: bool, in_background: bool = False) -> None:
    """A step, a save of torch.distributed.checkpoint, a step, its load, a step.

    With the fault rank 1 reads one bit of the first weight wrong. in_background: the save goes on
    while the training does, in a group of its own.
    """
    model, layout = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = f"{folder}-saved"

    def step(guard: upguard_plugin.Guard) -> None:
        model(torch.ones(8, 16) + dist.get_rank()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()

    with recording(model, optimizer, folder, layout) as guard, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(guard)
        state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        if in_background:
            group = dist.new_group(backend="gloo")
            saving = dcp.async_save(state, checkpoint_id=saved, process_group=group)
        else:
            dcp.save(state, checkpoint_id=saved)
        step(guard)
        if in_background:
            saving.result()
        found = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        with misread(fault and dist.get_rank() == 1):
            dcp.load(found, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=found["m"], optim_state_dict=found["o"])
        step(guard)


def uneven(folder: str, level: str, fault: bool, per_step: int) -> None:
    """Rank 1 has two steps more than rank 0, which joins; then both have one more.

    With the fault a bit of rank 1's weight flips before that.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())

    def step(guard: upguard_plugin.Guard) -> None:
        for k in range(per_step):
            guard.microbatch(k)
            model(torch.randn(4, 4, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()

    with recording(model, optimizer, folder, {"dp": 2}, level) as guard:
        with model.join():
            for _ in range(2 + 2 * dist.get_rank()):
                step(guard)
        if fault and dist.get_rank() == 1:
            flip_a_bit(next(iter(model.parameters())).detach())
        step(guard)


@contextmanager
def misread(on: bool) -> Iterator[None]:
    """A disk that gives back the first weight with one bit flipped."""
    commit = DefaultLoadPlanner.commit_tensor

    def commit_wrong(planner: Any, item: Any, tensor: Tensor) -> None:
        if item.dest_index.fqn == "m.0.weight":
            flip_a_bit(tensor)
        commit(planner, item, tensor)

    if on:
        DefaultLoadPlanner.commit_tensor = commit_wrong
    try:
        yield
    finally:
        DefaultLoadPlanner.commit_tensor = commit


@contextmanager
def recording(
    model: nn.Module,
    optimizer: Any,
    folder: str,
    layout: Mapping[str, Any],
    level: str = "module",
    sketch: bool = False,
    **options: Any,
) -> Iterator[upguard_plugin.Guard]:
    config = {"output_dir": folder, "level": level, "sketch": sketch}
    with upguard_plugin.enable(model, optimizer, config, layout=layout, **options) as guard:
        yield guard


def spoil_weight(module: nn.Module, args: Any) -> None:
    """Behind the back of all that gathers it."""
    flip_a_bit(module.weight.data)


def flip_a_bit(tensor: Tensor) -> None:
    """The lowest mantissa bit of the first element."""
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def marked_as_cut(folder: str, dtype: torch.dtype, fault: bool) -> None:
    """Weights are declared as cut over tp; with the fault each rank holds the same whole one.

    The weight of the norm begins as ones, the frozen scale stays a constant: parts all the same.
    """
    rank = dist.get_rank()
    torch.manual_seed(0 if fault else rank)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.RMSNorm(16)).to(dtype)
    model.scale = nn.Parameter(torch.full((16,), 0.02, dtype=dtype), requires_grad=False)
    data = torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rules = {"0.weight": "o[tp] i", "1.weight": "o[tp]", "scale": "o[tp]"}
    rules = {name: dict.fromkeys(STATE, rule) for name, rule in rules.items()}
    with recording(model, optimizer, folder, {"tp": 2}, sketch=True, placements=rules) as guard:
        for _ in range(STEPS):
            x = torch.randn(4, 8, generator=data).to(dtype)
            (model(x) * model.scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
