"""Short trainings of a small model, recorded with the state of their optimizers."""

from __future__ import annotations

import torch
from state_run import recording
from torch import nn


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def run_optimizer(make, steps=2, between=None):
    model = make_model()
    optimizer = make(model)
    with recording(model, optimizer) as (guard, run):
        for step in range(steps):
            if between is not None:
                between(step, model, optimizer)
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
    run.model = model
    return run


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)
