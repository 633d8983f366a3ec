"""What is recorded of an optimizer's step: gradients, settings, states, weights."""

from __future__ import annotations

import pytest
import torch
from optimizer_run import adamw, make_model, run_optimizer
from state_run import first_difference, recording
from torch import nn


def test_a_step_is_recorded_as_gradients_settings_states_and_weights():
    run = run_optimizer(adamw)

    after = [e for e in run.where(step=0) if e.phase in ("clip", "optimizer")]
    roles = list(dict.fromkeys(e.role for e in after))
    assert roles == ["grad", "scalar", "optimizer_state", "param", "rng"]
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for wanted in ({"role": "param"}, {"slot": "exp_avg"}, {"slot": "step"}):
        assert [e.boundary for e in run.where(step=0, phase="optimizer", **wanted)] == names


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: adamw(m, foreach=True),
        lambda m: adamw(m, fused=True),
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), amsgrad=True),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    ],
    ids=["sgd", "momentum", "foreach", "fused", "tensor lr", "adafactor"],
)
def test_two_equal_runs_are_identical_and_not_changed(make):
    run = run_optimizer(make)

    assert first_difference(run, run_optimizer(make)) is None
    model = make_model()
    optimizer = make(model)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), run.model.parameters(), strict=True)
    assert all(torch.equal(plain, recorded) for plain, recorded in pairs)


def test_sgd_without_state_has_none():
    run = run_optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))

    assert not run.where(role="optimizer_state")


class DecayAfter(torch.optim.AdamW):
    """AdamW that decays the weights after the update, with the same moments."""

    def step(self, closure=None):
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for parameter in group["params"]:
                parameter.data.mul_(1 - group["lr"] * decay)


def decayed(cls):
    def make(model):
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
        return cls(groups, lr=0.1)

    return make


def test_decay_after_the_update_is_found_in_the_first_weight_with_decay():
    # CASES 53
    baseline, target = run_optimizer(decayed(torch.optim.AdamW)), run_optimizer(decayed(DecayAfter))

    found = first_difference(baseline, target)
    assert (found.step, found.phase, found.role, found.boundary) == (
        0, "optimizer", "param", "0.weight",
    )  # fmt: skip
    biases = [run.where(step=0, phase="optimizer", boundary="0.bias") for run in (baseline, target)]
    assert [e.h for e in biases[0]] == [e.h for e in biases[1]]


def test_decay_as_l2_is_found_in_the_state_first():
    def l2(model):
        return torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)

    def decoupled(model):
        return torch.optim.Adam(
            model.parameters(), lr=0.1, weight_decay=0.5, decoupled_weight_decay=True
        )

    found = first_difference(run_optimizer(l2), run_optimizer(decoupled))
    assert found.boundary == "optimizer.group0.decoupled_weight_decay"

    runs = [run_optimizer(make).where(step=0, phase="optimizer") for make in (l2, decoupled)]
    state = next(a for a, b in zip(*runs, strict=True) if a != b and a.role != "scalar")
    assert (state.role, state.slot, state.boundary) == ("optimizer_state", "exp_avg", "0.weight")


def test_a_dropped_decay_group_is_found_in_the_groups_at_start():
    def dropped(model):
        optimizer = decayed(torch.optim.AdamW)(model)
        optimizer.param_groups[0]["params"] += optimizer.param_groups[1]["params"]
        optimizer.param_groups[1]["params"] = []
        return optimizer

    found = first_difference(run_optimizer(decayed(torch.optim.AdamW)), run_optimizer(dropped))

    assert (found.step, found.phase, found.role) == (0, "start", "scalar")
    assert (found.boundary, found.slot) == ("optimizer.group0", "params")


def test_a_learning_rate_set_between_forward_and_step_is_found_before_the_update():
    def run(lr):
        model = make_model()
        optimizer = adamw(model)
        with recording(model, optimizer) as (guard, run):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            guard.step()
        return run

    found = first_difference(run(0.1), run(0.2))

    assert (found.phase, found.role) == ("optimizer", "scalar")
    assert found.boundary == "optimizer.group0.lr"


def test_whole_numbers_and_floats_are_the_same_setting():
    def make(lr):
        return lambda m: torch.optim.SGD(m.parameters(), lr=lr)

    assert first_difference(run_optimizer(make(1)), run_optimizer(make(1.0))) is None


def test_lbfgs_with_its_closure_is_recorded():
    def run():
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss

        with recording(model, optimizer) as (guard, run):
            for _ in range(2):
                optimizer.step(closure)
                guard.step()
        return run

    first = run()
    assert first_difference(first, run()) is None
    assert first.where(role="optimizer_state", slot="old_dirs.0")
    phases = [e.phase for e in first.where(step=1)]
    assert "start" not in phases[phases.count("start") :]


class Wrapper:
    """Passes everything on to a torch optimizer, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def step(self):
        self.optimizer.step()


class HandMade:
    """No torch optimizer, but it has groups, states and a step."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.5}]
        self.state = {}

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state.setdefault(parameter, {"steps": 0})["steps"] += 1
            parameter.data.sub_(parameter.grad, alpha=0.5)

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


@pytest.mark.parametrize("given", [True, False], ids=["given", "not given"])
def test_a_step_behind_a_wrapper_is_recorded_once(given):
    model = make_model()
    wrapper = Wrapper(adamw(model))
    with recording(model, wrapper if given else ()) as (guard, run):
        model(torch.ones(2, 4)).square().mean().backward()
        wrapper.step()
        guard.step()

    assert first_difference(run, run) is None
    assert len(run.where(slot="exp_avg", boundary="0.weight")) == 1
    assert bool(run.writer.notes) is not given


def test_a_hand_made_optimizer_is_recorded_and_left_as_it_was():
    def make(model):
        return HandMade(model.parameters())

    run = run_optimizer(make)

    assert first_difference(run, run_optimizer(make)) is None
    assert run.where(step=0, phase="optimizer", role="optimizer_state", slot="steps")
    weights = [
        run.where(phase=p, role="param", boundary="0.weight") for p in ("optimizer", "start")
    ]
    assert weights[0][0].h == weights[1][1].h
    optimizer = make(make_model())
    with recording(make_model(), optimizer):
        assert "step" in vars(optimizer)
    assert "step" not in vars(optimizer)


def test_an_optimizer_of_other_parameters_is_none_of_ours():
    other = nn.Linear(2, 2)
    optimizer = adamw(other)
    with recording(make_model(), ()) as (guard, run):
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        guard.step()

    assert not run
    assert not [note for note in run.writer.notes if "AdamW" in note]


def test_an_optimizer_without_groups_is_said_to_be_unseen():
    class Opaque:
        def step(self):
            """Writes nothing."""

    model = make_model()
    optimizer = Opaque()
    with recording(model, optimizer) as (guard, run):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        guard.step()

    assert run.writer.notes == ["Opaque has no param_groups: its state was not recorded"]
    assert [e.boundary for e in run.where(phase="optimizer", role="param")] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip
