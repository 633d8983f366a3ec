"""Collectives of whole trainings: DDP's reducer and FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from memory_trace import Row, record_collectives
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from upguard_plugin.capture.collectives.owners import ParameterOwner

STEPS = 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 4)
    )


def _wrap(kind: str) -> nn.Module:
    model = _model()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.01)
    if kind == "ddp views":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    model[1] = nn.Identity()  # FSDP does not take buffers apart
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(model: nn.Module, trace: object = None) -> list[torch.Tensor]:
    """A few steps; the parameters afterwards, this rank's part of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        _phase(trace, "forward")
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        _phase(trace, "backward")
        loss.backward()
        _phase(trace, "optimizer")
        optimizer.step()
        optimizer.zero_grad()
        if trace is not None:
            trace.step()
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return [p.detach().clone() for p in local]


def _phase(trace: object, phase: str) -> None:
    if trace is not None:
        trace.recorder.position.phase = phase


def recorded(kind: str, times: int = 1) -> list[list[Row]]:
    """The rows of some trainings that are the same."""
    runs = []
    for _ in range(times):
        model = _wrap(kind)
        owners = [ParameterOwner(dict(model.named_parameters()))]
        with record_collectives(owners=owners) as trace:
            _train(model, trace)
        assert trace.notes == []
        runs.append(trace.rows)
    return runs


def weights(kind: str, watched: bool) -> list[list[float]]:
    model = _wrap(kind)
    if watched:
        with record_collectives() as trace:
            parameters = _train(model, trace)
    else:
        parameters = _train(model)
    return [p.flatten().tolist() for p in parameters]


@pytest.mark.parametrize("kind", ["ddp", "ddp views", "fsdp"])
def test_the_weights_are_the_same_with_and_without(two_ranks: Ranks, kind: str) -> None:
    assert two_ranks.run(weights, kind, True) == two_ranks.run(weights, kind, False)


@pytest.mark.parametrize("kind", ["ddp", "ddp views", "fsdp"])
def test_equal_trainings_have_equal_rows(two_ranks: Ranks, kind: str) -> None:
    for first, *others in two_ranks.run(recorded, kind, 11):
        assert len(first) > 3 * STEPS
        for other in others:
            assert other == first


def test_the_reducers_buckets_are_gradient_synchronisation(two_ranks: Ranks) -> None:
    for (rows,) in two_ranks.run(recorded, "ddp"):
        reduced = [row for row in rows if row.op == "all_reduce sum" and row.phase == "grad_sync"]
        last = [row for row in reduced if row.step == STEPS - 1]
        assert [row.moment for row in last] == ["launch", "completion"] * (len(last) // 2)
        numel = sum(row.shape[0] for row in last if row.moment == "launch")
        assert numel == sum(p.numel() for p in _model().parameters())
        assert {row.boundary for row in rows if row.phase == "forward"} <= {
            "broadcast[world]", "all_reduce[world]"
        }  # fmt: skip


def test_both_ranks_have_the_same_gradients_afterwards(two_ranks: Ranks) -> None:
    (first,), (second,) = two_ranks.run(recorded, "ddp")
    for moment, equal in (("launch", False), ("completion", True)):
        pair = [
            [row.h for row in rows if (row.phase, row.moment) == ("grad_sync", moment)]
            for rows in (first, second)
        ]
        assert pair[0]
        assert (pair[0] == pair[1]) is equal


def test_fsdp_gathers_in_forward_and_scatters_gradients(two_ranks: Ranks) -> None:
    for (rows,) in two_ranks.run(recorded, "fsdp"):
        launched = [row for row in rows if row.moment == "launch" and row.step == 1]
        kinds = {(row.phase, row.boundary) for row in launched}
        assert kinds == {
            ("forward", "all_gather[world]"),
            ("backward", "all_gather[world]"),
            ("grad_sync", "reduce_scatter[world]"),
        }


def redistributed() -> list[tuple[str, str, str | None]]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    with record_collectives() as trace:
        gathered = sharded.redistribute(mesh, [Replicate(), Replicate()]).to_local()
    assert torch.equal(gathered, whole)
    return [(row.boundary, row.role, row.moment) for row in trace.rows]


def test_a_redistributed_dtensor_shows_its_collective(two_ranks: Ranks) -> None:
    for rows in two_ranks.run(redistributed):
        assert rows == [
            ("all_gather[world]", "input", "launch"),
            ("all_gather[world]", "input", "completion"),
            ("all_gather[world]", "output", "completion"),
        ]
