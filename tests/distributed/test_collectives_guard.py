"""Whole runs under DDP and FSDP2, recorded by `enable` and compared by their step digests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from memory_trace import store
from ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import upguard_plugin
from upguard_plugin.fingerprint import fingerprint_array
from upguard_plugin.trace.reader import open_trace

STEPS = 3
NUM_PAIRS = 20


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4))
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.0004)
    for layer in model:
        if not isinstance(layer, nn.GELU):
            fully_shard(layer)
    return fully_shard(model)


def train(
    kind: str,
    folder: str | None,
    level: str = "module",
    layout: dict[str, int] | None = None,
    dump: dict[str, str] | None = None,
) -> list[list[float]]:
    """The weights after a few steps; recorded if a folder is given."""
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = None
    if folder is not None:
        config = {"output_dir": folder, "level": level, "dump": dump}
        guard = upguard_plugin.enable(model, optimizer, config, layout=layout)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if guard is not None:
            guard.step()
    if guard is not None:
        guard.close()
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return [p.detach().flatten().tolist() for p in local]


def train_often(kind: str, folder: str, times: int) -> None:
    for k in range(times):
        train(kind, f"{folder}/{k}")
        dist.barrier()


def _digests(run: Path) -> dict[int, list[bytes]]:
    trace = open_trace(run)
    assert all(trace.end(rank).complete for rank in (0, 1))
    return {rank: [entry.digest for entry in trace.steps(rank)] for rank in (0, 1)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_twin_runs_have_equal_digests(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    num_runs = NUM_PAIRS + 1
    two_ranks.run(train_often, kind, str(tmp_path), num_runs)
    runs = [_digests(tmp_path / str(k)) for k in range(num_runs)]
    assert [len(steps) for steps in runs[0].values()] == [STEPS, STEPS]
    assert [run == runs[0] for run in runs] == [True] * num_runs


class Summed(nn.Module):
    """Returns what is summed over the ranks, before it is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.num_calls = name, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = f"{self.name} {self.num_calls}"
        self.num_calls += 1
        if dist.get_rank() == 1:
            store().wait([key])
        result = functional.all_reduce(x, "sum", dist.group.WORLD)
        if dist.get_rank() == 0:
            store().set(key, "rank 1 may come")
        return result


def sum_often(folder: str, level: str) -> float:
    model = nn.Sequential(Summed(folder))
    config = {"output_dir": folder, "level": level}
    total = 0.0
    with upguard_plugin.enable(model, None, config, layout={}) as guard:
        for _ in range(30):
            total += float(model(torch.ones(4096)).sum())
            guard.step()
    return total


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_module_may_return_what_is_still_under_way(
    two_ranks: Ranks, tmp_path: Path, level: str
) -> None:
    """Its event has to wait for the collective, and the collective's end is an event too."""
    assert two_ranks.run(sum_often, str(tmp_path / "run"), level) == [30 * 2.0 * 4096] * 2
    assert all(open_trace(tmp_path / "run").end(rank).complete for rank in (0, 1))


@pytest.mark.parametrize("level", ["stage", "module", "op"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_recording_does_not_change_the_weights(
    two_ranks: Ranks, tmp_path: Path, kind: str, level: str
) -> None:
    recorded = two_ranks.run(train, kind, str(tmp_path / "run"), level)
    assert recorded == two_ranks.run(train, kind, None)


def test_a_bucket_names_its_axis_and_its_parameters(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train, "ddp", str(tmp_path / "run"), "stage", {"dp": 2})
    trace = open_trace(tmp_path / "run")
    for rank in (0, 1):
        batch = trace.read(rank, STEPS - 1)
        keys = [batch.key_of(i) for i in range(len(batch))]
        reduced = [k for k in keys if k.op == "all_reduce sum" and k.moment == "completion"]
        assert [(k.boundary, k.phase, k.shape) for k in reduced] == [
            ("all_reduce[dp] bucket 0 (3.bias, 3.weight)", "grad_sync", (132,)),
            ("all_reduce[dp] bucket 1 (2.bias, 2.weight)", "grad_sync", (1056,)),
            ("all_reduce[dp] bucket 2 (0.bias, 0.weight)", "grad_sync", (544,)),
        ]


def test_the_buffers_of_collectives_can_be_kept_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    dump = {"boundary": "all_reduce*", "steps": "1"}
    two_ranks.run(train, "ddp", str(tmp_path / "run"), "module", None, dump)
    trace = open_trace(tmp_path / "run")
    kept, batch = trace.read_tensors(0, "step1"), trace.read(0, 1)
    buffers = [i for i in range(len(batch)) if batch.key_of(i).boundary.startswith("all_reduce")]
    assert {batch.key_of(i).moment for i in buffers} == {"launch", "completion"}
    assert set(kept) == {str(batch.seq[i]) for i in buffers}
    assert all(fingerprint_array(kept[str(batch.seq[i])]).h == batch.h[i] for i in buffers)
