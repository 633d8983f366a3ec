"""State capture under DistributedDataParallel: two gloo processes, several runs in one spawn."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "capture"))
from memory_run import first_difference, recording


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


def rank_main(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
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
    found["missing"] = (first.step, first.phase, first.role, first.boundary)
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = tmp_path_factory.mktemp("ddp") / "store"
    processes = [
        context.Process(target=rank_main, args=(rank, store, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    return found


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


def test_a_missing_all_reduce_is_found_when_gradients_are_complete(found):
    for rank in (0, 1):
        step, phase, role, boundary = found[rank]["missing"]
        assert (step, phase, role) == (0, "grad_sync", "grad")
        assert boundary == "0.weight"
