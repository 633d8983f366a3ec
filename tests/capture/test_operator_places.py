"""The module, the phase and the line that an operator is recorded under."""

from __future__ import annotations

import torch
from torch import nn

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
