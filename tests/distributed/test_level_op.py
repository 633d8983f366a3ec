"""Level `op` on two ranks: the weights keep their bits, and two equal runs are identical."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import upguard_plugin
from upguard_plugin.trace.reader import open_trace

KINDS = ("ddp", "fsdp2")


def build(kind: str) -> tuple[nn.Module, nn.Module]:
    """(what is trained, what holds the parameters)"""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    if kind == "ddp":
        return DistributedDataParallel(inner), inner
    for layer in inner:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(inner), inner


def train(kind: str, output: Path | None, **selected: str) -> list[bytes]:
    """Three steps; the bytes of this rank's weights afterwards."""
    model, inner = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"level": "op", "output_dir": str(output), "enabled": output is not None, **selected}
    draws = torch.Generator().manual_seed(dist.get_rank())
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4, generator=draws)).square().mean().backward()
            optimizer.step()
            guard.step()
    dist.barrier()
    local = [getattr(p, "_local_tensor", p).detach() for p in inner.parameters()]
    return [p.contiguous().numpy().tobytes() for p in local]


def trained_on_this_rank(folder: str) -> dict[tuple[str, str], bool]:
    """Whether the weights are those of a run without capture, by kind and what was recorded."""
    same = {}
    for kind in KINDS:
        plain = train(kind, None)
        whole = [train(kind, Path(folder) / f"{kind}{n}") for n in (0, 1)]
        outputs = train(kind, Path(folder) / f"{kind}-outputs", roles="output")
        same[kind, "inputs and outputs"] = whole == [plain, plain]
        same[kind, "outputs"] = outputs == plain
    return same


@pytest.fixture(scope="module")
def runs(pool_of_two):
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), pool_of_two.get().run(trained_on_this_rank, folder)


@pytest.mark.parametrize("recorded", ["inputs and outputs", "outputs"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_bits_of_a_run_without_capture(runs, kind, recorded):
    assert [same[kind, recorded] for same in runs[1]] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_two_equal_runs_are_identical(runs, kind):
    traces = [open_trace(runs[0] / f"{kind}{n}") for n in (0, 1)]
    for rank in (0, 1):
        for trace in traces:
            assert trace.end(rank).complete, trace.end(rank).reason
        digests = [[entry.digest for entry in trace.steps(rank)] for trace in traces]
        outputs = open_trace(runs[0] / f"{kind}-outputs")
        assert outputs.end(rank).complete
        assert 0 < len(outputs.read(rank, 1)) < len(traces[0].read(rank, 1))
        assert len(digests[0]) == 3
        assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_forward_backward_and_optimizer_are_there(runs, kind):
    batch: Any = open_trace(runs[0] / f"{kind}0").read(0, 1)
    keys = [batch.key_of(row) for row in range(len(batch))]
    seen = {(key.phase, key.operator, key.boundary) for key in keys}
    assert {
        ("forward", "aten.addmm", "0"), ("backward", "aten.mm", "3"),
        ("forward", "aten.gelu", "2"),
    } <= seen  # fmt: skip
    assert any(key.phase == "optimizer" and key.boundary == "0.weight" for key in keys)
