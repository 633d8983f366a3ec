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
from tests.memory_fill import FILLS, fill_memory
from upguard_plugin.trace.reader import open_trace

KINDS = ("ddp", "fsdp2")


def build(kind: str) -> tuple[nn.Module, nn.Module]:
    """(what is trained, what holds the parameters)"""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))
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
    """Whether the weights are those of a run without capture, by kind and what was recorded.

    Memory that nobody wrote has other bytes in each of the two whole runs.
    """
    same = {}
    for kind in KINDS:
        plain, whole = train(kind, None), []
        for n, fill in enumerate(FILLS):
            fill_memory(fill)
            whole.append(train(kind, Path(folder) / f"{kind}{n}"))
        fill_memory(None)
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


def operators_of_a_reduce_scatter(folder: str) -> list[str]:
    """The operators, in the order of a trace, of a collective that gloo finishes with a copy."""
    model = nn.Linear(2, 2)
    config = {"level": "op", "output_dir": folder}
    with upguard_plugin.enable(model, None, config) as guard:
        given, result = torch.ones(4), torch.empty(2)
        dist.reduce_scatter_tensor(result, given)
        result.cos()
        guard.step()
    dist.barrier()
    batch: Any = open_trace(Path(folder)).read(dist.get_rank(), 0)
    operators = [batch.key_of(row).operator for row in range(len(batch))]
    return [name for name in operators if name in ("aten.copy_", "aten.cos") or "c10d" in str(name)]


def test_what_a_backend_runs_to_finish_a_collective_is_no_event(two_ranks, tmp_path):
    (operators, _) = two_ranks.run(operators_of_a_reduce_scatter, str(tmp_path / "run"))

    assert operators == ["c10d._reduce_scatter_base_"] * 3 + ["aten.cos"] * 2
