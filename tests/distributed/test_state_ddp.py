"""State capture under DistributedDataParallel: two gloo processes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "capture"))
from state_run import first_difference, recording


def train(rank, record=True, synchronise=True, bucket_view=False):
    """Two steps of two micro-batches, the last of which synchronises; returns (model, run)."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = DistributedDataParallel(inner, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    context = recording(model, optimizer) if record else contextlib.nullcontext((None, None))
    with context as (guard, run):
        for _ in range(2):
            for k in range(2):
                x = torch.randn(3, 4, generator=generator)
                if record:
                    guard.microbatch(k)
                local = contextlib.nullcontext() if k and synchronise else model.no_sync()
                with local:
                    model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if record:
                guard.step()
    return inner, run


def all_runs():
    """What this rank found in each pair of runs."""
    rank, found = dist.get_rank(), {}
    for view in (False, True):
        plain, _ = train(rank, record=False, bucket_view=view)
        model, clean = train(rank, bucket_view=view)
        _, again = train(rank, bucket_view=view)
        pairs = zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
        found[f"bits kept {view}"] = all(torch.equal(a, b) for a, b in pairs)
        found[f"identical {view}"] = first_difference(clean, again) is None
        local = clean.where(step=0, phase="accumulate", role="grad", boundary="0.weight")
        (synced,) = clean.where(step=0, phase="grad_sync", role="grad", boundary="0.weight")
        found[f"local {view}"], found[f"synced {view}"] = local[-1].h, synced.h
    _, missing = train(rank, synchronise=False)
    first = first_difference(clean, missing)
    found["missing"] = (first.step, first.phase, first.operator)
    grads = [run.where(step=0, phase="grad_sync", role="grad") for run in (clean, missing)]
    found["unsynchronised"] = [a.boundary for a, b in zip(*grads, strict=True) if a.h != b.h]
    return found


@pytest.fixture(scope="module")
def found(pool_of_two):
    return pool_of_two.get().run(all_runs)


@pytest.mark.parametrize("view", [False, True])
def test_weights_have_the_bits_of_a_run_without_capture(found, view):
    assert all(found[rank][f"bits kept {view}"] for rank in (0, 1))


@pytest.mark.parametrize("view", [False, True])
def test_two_equal_runs_are_identical(found, view):
    assert all(found[rank][f"identical {view}"] for rank in (0, 1))


@pytest.mark.parametrize("view", [False, True])
def test_gradients_are_recorded_before_and_after_their_synchronisation(found, view):
    assert found[0][f"local {view}"] != found[1][f"local {view}"]
    assert found[0][f"synced {view}"] == found[1][f"synced {view}"]


def test_a_missing_all_reduce_is_found_and_the_gradients_it_left_alone(found):
    for rank in (0, 1):
        step, phase, operator = found[rank]["missing"]
        assert (step, phase) == (0, "grad_sync")
        assert "allreduce" in operator
        assert "0.weight" in found[rank]["unsynchronised"]
