from __future__ import annotations

import torch
from memory_run import first_difference, recording
from torch import nn


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model.register_buffer("scale", torch.ones(2), persistent=False)
    return model


def train(model, optimizer, steps=3, between=None, record=True, inputs=None, attach=True):
    """A plain loop; `between(step)` runs before each step's data."""
    generator = torch.Generator().manual_seed(1)
    with recording(model, optimizer) as (guard, run):
        for step in range(steps):
            if between is not None:
                between(step)
            x = torch.randn(6, 4, generator=generator)
            loss = (model(x) * model.scale).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
    return run


def run_adamw(between=None, **options):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, **options)
    bound = None if between is None else lambda step: between(step, model, optimizer)
    return train(model, optimizer, between=bound)


def test_start_has_every_kind_of_state():
    run = run_adamw()

    start = run.where(step=1, phase="start")
    assert {(e.role, e.slot) for e in start} >= {
        ("param", "value"), ("buffer", "value"), ("optimizer_state", "exp_avg"),
        ("optimizer_state", "exp_avg_sq"), ("optimizer_state", "step"), ("scalar", "0"),
        ("scalar", "params"), ("rng", "state"),
    }  # fmt: skip
    assert {e.boundary for e in start if e.role == "buffer"} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked", "scale",
    }  # fmt: skip
    assert {"optimizer.group0.lr", "optimizer.group0.betas.0"} <= {e.boundary for e in start}
    assert {e.microbatch for e in start} == {-1}


def test_the_same_run_twice_is_identical():
    assert first_difference(run_adamw(), run_adamw()) is None
