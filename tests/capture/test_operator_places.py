"""The module, the phase and the line that an operator is recorded under."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import upguard_plugin
from tests.capture.operator_run import OperatorCall, calls_of, train


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second((x + self.first(x)).sin()) * 2


def test_an_operator_between_two_modules_belongs_to_the_one_around_them(tmp_path):
    calls = calls_of(train(tmp_path / "run", nn.Sequential(Residual(), nn.Linear(4, 4))))

    forward = [call for call in calls if call.phase == "forward"]
    assert forward == [
        OperatorCall("forward", "0.first", "aten.addmm", 0),
        OperatorCall("forward", "0", "aten.add", 0),
        OperatorCall("forward", "0", "aten.sin", 0),
        OperatorCall("forward", "0.second", "aten.addmm", 0),
        OperatorCall("forward", "0", "aten.mul", 0),
        OperatorCall("forward", "1", "aten.addmm", 0),
    ]
    backward = {(call.boundary, call.operator) for call in calls if call.phase == "backward"}
    assert {("0", "aten.mul"), ("0", "aten.cos"), ("0.second", "aten.mm")} <= backward


class Gated(nn.Module):
    """Writes in place what its own backward needs as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = self.lin(x).chunk(2, dim=1)
        return h.clone().mul_(gate).div_(gate.square() + 1).sin_()


def test_the_backward_of_a_write_that_keeps_a_copy_belongs_to_its_module(tmp_path):
    calls = calls_of(train(tmp_path / "run", nn.Sequential(Gated(), nn.Linear(4, 4))))

    backward = [call for call in calls if call.phase == "backward"]
    assert {call.boundary for call in backward} == {"0", "0.lin", "1"}
    assert {("0", "aten.cos"), ("0", "aten.div"), ("0", "aten.mul")} <= {
        (call.boundary, call.operator) for call in backward
    }


class Filled(nn.Module):
    """Fills a buffer slice by slice, as caches are filled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        h[:, 0] = x[:, 1]
        h[:, 2:].mul_(2.5)
        return h


class Views(nn.Module):
    """Reads views of what was written since they were made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        one, two = h[:, :2], h[:, 2:]
        h.mul_(2)
        return torch.cat([one * two, one], 1)


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_the_backward_of_writes_to_views_belongs_to_their_module(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Filled(), Squared(), Views(), Squared())
    calls = calls_of(train(tmp_path / "run", model))

    seen = {(call.boundary, call.operator) for call in calls if call.phase == "backward"}
    operators = {name: {o for boundary, o in seen if boundary == name} for name, _ in seen}
    assert operators == {
        "4": {"aten.mul", "aten.add"},
        "3": {"aten.mul", "aten.add", "aten.new_zeros", "aten.copy_"},
        "2": {"aten.mul", "aten.add"},
        "1": {"aten.copy_", "aten.clone", "aten.mul", "aten.zeros_like", "aten.select_backward",
              "aten.add"},
        "0": {"aten.mm", "aten.sum"},
    }  # fmt: skip


def test_the_backward_of_a_backward_belongs_to_the_module_of_the_forward(tmp_path):
    def forward(model, x):
        x.requires_grad_()
        y = model(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient.square()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    calls = calls_of(train(tmp_path / "run", model, forward=forward))

    backward = [call for call in calls if call.phase == "backward"]
    assert {call.boundary for call in backward} == {"(outside)", "0", "1", "2"}
    assert len([c for c in backward if (c.boundary, c.operator) == ("1", "aten.mul")]) == 3


def recorded(folder, optimizer_of, before_step):
    """One step of two layers; the calls of its operators."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optimizer_of(model.parameters())
    settings = {"level": "op", "output_dir": str(folder)}
    with upguard_plugin.enable(model, optimizer, settings) as guard:
        model(torch.ones(2, 4)).sum().backward()
        before_step(model, optimizer)
        optimizer.step()
        guard.step()
    return calls_of(folder)


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_operators_of_a_first_update_belong_to_its_parameters(tmp_path):
    """Their counters of steps are made before the first of them is raised."""
    adam = partial(torch.optim.Adam, foreach=False, eps=0.0)
    calls = recorded(tmp_path / "run", adam, lambda model, optimizer: None)
    added = [c.boundary for c in calls if (c.phase, c.operator) == ("optimizer", "aten.add_")]
    assert added == [name for name in NAMES for _ in ("step", "eps")]


def test_operators_that_clip_are_in_that_phase_and_belong_to_the_parameters(tmp_path):
    calls = recorded(
        tmp_path / "run", partial(torch.optim.SGD, lr=0.1, foreach=False),
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    )  # fmt: skip
    clipping = [c for c in calls if c.phase == "clip"]
    for operator in ("aten._foreach_norm", "aten._foreach_mul_"):
        owners = dict.fromkeys(c.boundary for c in clipping if c.operator == operator)
        assert list(owners) == NAMES
    assert {c.boundary for c in clipping if "_foreach" not in c.operator} == {"(outside)"}
    assert not [c for c in calls if c.phase == "backward" and "_foreach" in c.operator]
    assert [c.boundary for c in calls if c.phase == "optimizer"] == NAMES
