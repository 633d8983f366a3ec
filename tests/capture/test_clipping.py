from __future__ import annotations

import pytest
import torch
from state_run import first_difference, recording
from torch import nn
from torch.nn.utils import clip_grad_norm_  # imported by name before any recording


def run_clipped(max_norm=0.1, between=None, scaled=False, overflow=False):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0, growth_interval=1)
    norms = []
    with recording(model, optimizer) as (guard, run):
        for step in range(2):
            loss = model(torch.ones(3, 4)).square().mean()
            scaler.scale(loss).backward()
            if overflow and step == 0:
                model.weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.parameters(), max_norm))
            if between is not None:
                between(step, model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            guard.step()
    run.norms, run.model = norms, model
    return run


def grads(run, **wanted):
    return [(e.phase, e.operator) for e in run.where(boundary="weight", role="grad", **wanted)]


def test_norm_and_clipped_gradients_are_recorded_by_name():
    run = run_clipped()

    assert grads(run, step=0) == [
        ("accumulate", None), ("clip", None), ("clip", "clip_grad_norm_"), ("clip", None),
    ]  # fmt: skip
    (norm,) = run.where(step=0, boundary="grad_norm")
    assert (norm.role, norm.phase, norm.operator) == ("scalar", "clip", "clip_grad_norm_")
    accumulated, complete, clipped, used = run.where(step=0, boundary="weight", role="grad")
    assert accumulated.h == complete.h != clipped.h == used.h


def test_the_norm_comes_after_the_gradients_and_before_the_clipped_ones():
    run = run_clipped()

    order = [e.boundary + "/" + str(e.operator) for e in run.where(step=0, phase="clip")]
    assert order == [
        "weight/None", "bias/None", "grad_norm/clip_grad_norm_", "weight/clip_grad_norm_",
        "bias/clip_grad_norm_", "weight/None", "bias/None",
    ]  # fmt: skip


def test_another_max_norm_is_found_in_the_clipped_gradients():
    found = first_difference(run_clipped(), run_clipped(max_norm=0.2))

    assert (found.step, found.phase, found.operator) == (0, "clip", "clip_grad_norm_")
    assert (found.role, found.boundary) == ("grad", "weight")


def test_a_write_between_clip_and_step_is_found_in_the_gradients_the_step_uses():
    def fault(step, model):
        if step == 1:
            model.bias.grad.data.mul_(2)

    found = first_difference(run_clipped(), run_clipped(between=fault))

    assert (found.step, found.phase, found.operator) == (1, "clip", None)
    assert (found.role, found.boundary, found.call) == ("grad", "bias", 1)


def test_unscaled_gradients_and_the_loss_scale_are_recorded():
    run = run_clipped(scaled=True)

    assert ("clip", "unscale_") in grads(run, step=0)
    scale = [(e.step, e.phase, e.h) for e in run.where(boundary="loss_scale", slot="0")]
    assert [(step, phase) for step, phase, _ in scale] == [(0, "start"), (1, "start")]
    assert scale[0][2] != scale[1][2]  # it has grown


def test_a_step_that_the_scaler_skips_writes_no_weights():
    run = run_clipped(scaled=True, overflow=True)

    assert not run.where(step=0, phase="optimizer", role="optimizer_state")
    start, end = (
        next(e.h for e in run.where(step=0, phase=phase, role="param", boundary="weight"))
        for phase in ("start", "optimizer")
    )
    assert start == end
    assert run.where(step=1, phase="optimizer", role="scalar")


@pytest.mark.parametrize("scaled", [False, True])
def test_the_same_run_twice_is_identical(scaled):
    assert first_difference(run_clipped(scaled=scaled), run_clipped(scaled=scaled)) is None


def test_recording_changes_neither_norm_nor_weights():
    run = run_clipped()

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for _ in range(2):
        model(torch.ones(3, 4)).square().mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    assert run.norms == norms
    assert torch.equal(run.model.weight, model.weight)
