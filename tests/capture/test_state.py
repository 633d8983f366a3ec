from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from state_run import first_difference, recording
from torch import nn

from upguard_plugin.capture.gradients import GradientProbe


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model.register_buffer("scale", torch.ones(2), persistent=False)
    return model


def seed_all():
    random.seed(0)
    np.random.seed(0)


def run_adamw(between=None, steps=3, record=True):
    """A plain loop; `between(step, model, optimizer)` runs before each step's data."""
    seed_all()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1)

    def loop(guard=None):
        for step in range(steps):
            if between is not None:
                between(step, model, optimizer)
            x = torch.randn(6, 4, generator=generator)
            loss = (model(x) * model.scale).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if guard is not None:
                guard.step()

    if not record:
        loop()
        return model
    with recording(model, optimizer) as (guard, run):
        loop(guard)
    run.model = model
    return run


@pytest.fixture(scope="module")
def clean():
    return run_adamw()


def test_start_has_every_kind_of_state(clean):
    start = clean.where(step=1, phase="start")

    assert {(e.role, e.slot) for e in start} == {
        ("param", "value"), ("buffer", "value"), ("optimizer_state", "exp_avg"),
        ("optimizer_state", "exp_avg_sq"), ("optimizer_state", "step"), ("scalar", "0"),
        ("scalar", "params"), ("rng", "state"),
    }  # fmt: skip
    assert {e.boundary for e in start if e.role == "buffer"} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked", "scale",
    }  # fmt: skip
    assert {e.microbatch for e in start} == {-1}
    assert not clean.where(step=0, phase="start", role="optimizer_state")


def test_start_comes_before_everything_else_of_its_step(clean):
    phases = [e.phase for e in clean if e.step == 1]

    assert phases == ["start"] * phases.count("start") + [p for p in phases if p != "start"]


def test_the_same_run_twice_is_identical(clean):
    assert first_difference(clean, run_adamw()) is None


def test_recording_changes_no_bit(clean):
    plain = run_adamw(record=False).state_dict()

    recorded = clean.model.state_dict()
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)


def flip(tensor):
    """Flip the lowest bit of the first element, as no operator that torch knows of would."""
    tensor.detach().numpy().reshape(-1).view(np.int32)[0] ^= 1


def test_a_weight_bit_between_two_steps_is_found_at_the_next_start(clean):
    def fault(step, model, optimizer):
        if step == 2:
            flip(model[3].weight)

    found = first_difference(clean, run_adamw(fault))

    assert (found.step, found.phase, found.role, found.boundary) == (
        2,
        "start",
        "param",
        "3.weight",
    )


def test_an_adam_state_bit_is_found_as_that_state(clean):
    def fault(step, model, optimizer):
        if step == 2:
            flip(optimizer.state[model[0].bias]["exp_avg"])

    found = first_difference(clean, run_adamw(fault))

    assert (found.step, found.phase, found.role) == (2, "start", "optimizer_state")
    assert (found.boundary, found.slot) == ("0.bias", "exp_avg")


def test_a_buffer_that_is_rounded_is_found_before_the_first_data(clean):
    # CASES 49: a cast to bfloat16 and back; the buffer is not persistent.
    def fault(step, model, optimizer):
        if step == 0:
            model.scale += 2**-10

    found = first_difference(clean, run_adamw(fault))

    assert (found.step, found.phase, found.role, found.boundary) == (0, "start", "buffer", "scale")
    assert found.dtype == "float32"


def test_a_learning_rate_that_fell_too_far_is_found_at_the_next_start(clean):
    # CASES 51: the scheduler is stepped after the update of step 0.
    def fault(step, model, optimizer):
        if step == 1:
            optimizer.param_groups[0]["lr"] *= 0.5

    found = first_difference(clean, run_adamw(fault))

    assert (found.step, found.phase, found.role) == (1, "start", "scalar")
    assert found.boundary == "optimizer.group0.lr"


@pytest.mark.parametrize(
    ("draw", "boundary"),
    [
        (random.random, "rng.python"),
        (np.random.rand, "rng.numpy"),
        (lambda: torch.rand(1), "rng.torch_cpu"),
    ],
)
def test_one_extra_draw_is_found_in_its_generator(clean, draw, boundary):
    def fault(step, model, optimizer):
        if step == 1:
            draw()

    found = first_difference(clean, run_adamw(fault))

    assert (found.step, found.phase, found.role) == (1, "start", "rng")
    assert found.boundary == boundary


def test_gradients_that_were_not_cleared_are_found_at_start(clean):
    def fault(step, model, optimizer):
        if step == 1:
            model[0].bias.grad = torch.zeros(8)

    found = first_difference(clean, run_adamw(fault))

    assert (found.step, found.phase, found.role, found.boundary) == (1, "start", "grad", "0.bias")


def test_weights_that_no_optimizer_writes_are_recorded_when_the_step_ends():
    model = make_model()
    with recording(model, ()) as (guard, run):
        model(torch.randn(6, 4)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        guard.step()

    end = run.where(phase="optimizer", role="param")
    assert [e.boundary for e in end] == [name for name, _ in model.named_parameters()]
    start = run.where(phase="start", role="param")
    assert all(a.h != b.h for a, b in zip(start, end, strict=True) if "weight" in a.boundary)


def test_a_buffer_that_forward_wrote_is_recorded_in_the_step_that_wrote_it(clean):
    def values(phase):
        return {e.boundary: e.h for e in clean.where(step=0, phase=phase, role="buffer")}

    found, left = values("start"), values("forward")
    assert {name for name in found if found[name] != left[name]} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip


def test_a_replaced_parameter_is_recorded_instead_of_the_old_one(clean):
    def fault(step, model, optimizer):
        if step == 1:
            model[3].bias = nn.Parameter(model[3].bias.detach() + 1)

    run = run_adamw(fault)

    found = first_difference(clean, run)
    assert (found.step, found.phase, found.boundary) == (1, "start", "3.bias")
    assert run.where(step=1, phase="accumulate", boundary="3.bias")


def hooks_of(model):
    return [
        (name, bool(p._backward_hooks), bool(p._post_accumulate_grad_hooks))
        for name, p in model.named_parameters()
    ] + [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]


def test_detach_leaves_no_hook_and_no_replaced_function():
    from torch.amp import GradScaler
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer as torch_optimizer

    def torch_functions():
        return (
            clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, GradScaler.scale,
            GradScaler.unscale_, dict(torch_optimizer._global_optimizer_pre_hooks),
            dict(torch_optimizer._global_optimizer_post_hooks),
        )  # fmt: skip

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, hooks_before = torch_functions(), hooks_of(model)
    with recording(model, optimizer) as (guard, _):
        assert hooks_of(model) != hooks_before
        assert torch_functions() != before
        model(torch.ones(6, 4)).sum().backward()
        optimizer.step()
        guard.step()

    assert hooks_of(model) == hooks_before
    assert torch_functions() == before
    assert all(p._backward_hooks is None for p in model.parameters())
    assert "step" not in vars(optimizer)


def test_a_dropped_parameter_is_not_kept_alive():
    with recording(make_model(), ()) as (guard, _):
        probe = GradientProbe(guard)
        parameter = nn.Parameter(torch.ones(2))
        probe.watch([("dropped", parameter)])
        ref = weakref.ref(parameter)
        del parameter
        gc.collect()

        assert ref() is None


def test_an_adapter_adds_state_and_generators():
    model = make_model()
    master = torch.ones(3)
    with recording(model, ()) as (guard, run):
        states = guard.probes[0]
        states.sources.append(lambda now: now.tensors("master", "master", [("flat", master)]))
        states.generators["tracker"] = lambda: b"12345"
        model(torch.ones(6, 4)).sum().backward()
        master += 1
        guard.step()

    assert [e.phase for e in run.where(role="master", boundary="flat")] == ["start", "optimizer"]
    assert run.where(boundary="rng.tracker")[0].shape == (5,)
