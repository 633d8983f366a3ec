"""Several optimizers, or several steps of one, in one step of the run."""

from __future__ import annotations

import torch
from optimizer_run import adamw, make_model
from state_run import first_difference, recording
from torch import nn


def run_resumed(swap):
    """Two optimizers, saved after step 1 and loaded into a new process's objects."""

    def build():
        torch.manual_seed(0)
        model = nn.ModuleDict({"dense": nn.Linear(4, 4), "experts": nn.ModuleDict()})
        model["experts"]["0"] = nn.Linear(4, 4)
        return model, [adamw(model["dense"]), adamw(model["experts"])]

    def steps(model, optimizers, count, guard=None):
        for _ in range(count):
            x = torch.ones(2, 4)
            if guard is not None:
                guard.data("x", x)
            model["experts"]["0"](model["dense"](x)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if guard is not None:
                guard.step()

    model, optimizers = build()
    steps(model, optimizers, 2)
    weights = model.state_dict()
    states = [optimizer.state_dict() for optimizer in optimizers]
    if swap:
        states[1] = states[0]
    model, optimizers = build()
    model.load_state_dict(weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    with recording(model, optimizers) as (guard, run):
        steps(model, optimizers, 2, guard)
    return run


def test_the_state_of_another_optimizer_is_found_right_after_loading():
    # CASES 15
    found = first_difference(run_resumed(False), run_resumed(True))

    assert (found.step, found.phase, found.role) == (0, "start", "optimizer_state")
    assert found.boundary == "experts.0.weight"
    assert found.slot == "exp_avg"


def test_several_optimizers_have_numbered_settings():
    run = run_resumed(False)

    assert first_difference(run, run_resumed(False)) is None
    settings = {e.boundary for e in run.where(slot="params")}
    assert settings == {"optimizer0.group0", "optimizer1.group0"}


def test_two_steps_of_one_optimizer_are_two_calls():
    model = make_model()
    optimizer = adamw(model)
    with recording(model, optimizer) as (guard, run):
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        guard.step()

    assert first_difference(run, run) is None
    weights = run.where(phase="optimizer", role="param", boundary="0.weight")
    assert [e.call for e in weights] == [0, 1]


def run_gan():
    """Two models, each with its optimizer, that step one after the other in every step."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = [adamw(judge), adamw(maker)]
    models = (("maker.", maker), ("judge.", judge))
    generator = torch.Generator().manual_seed(1)
    with recording(models, optimizers) as (guard, run):
        for _ in range(2):
            noise = torch.randn(3, 2, generator=generator)
            made = maker(noise)
            (judge(torch.ones(3, 4)).mean() - judge(made.detach()).mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            judge(made).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            guard.step()
    return run


def test_optimizers_that_take_turns_are_recorded_in_turn():
    run = run_gan()

    assert first_difference(run, run_gan()) is None
    phases = [(e.phase, e.boundary) for e in run.where(step=0, role="param")]
    assert phases.index(("optimizer", "judge.weight")) < phases.index(("optimizer", "maker.weight"))
    used = [e.boundary for e in run.where(step=0, phase="clip", role="grad")]
    assert used == ["judge.weight", "judge.bias", "maker.weight", "maker.bias"]


def test_gradients_left_over_from_another_optimizers_turn_are_found_at_the_next_start():
    # The judge keeps the gradients that the maker's turn gave it.
    run = run_gan()

    left = {e.boundary for e in run.where(step=1, phase="start", role="grad")}
    assert left == {"judge.weight", "judge.bias"}
