"""A flat buffer is known by the copies that filled it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import upguard_plugin
from upguard_plugin.capture import gradients
from upguard_plugin.capture.contents import stretches_of
from upguard_plugin.records import Stretch


@pytest.fixture
def several_ranks(monkeypatch):
    """Buffers are followed where there is somebody to reduce them with."""
    monkeypatch.setattr(gradients, "_is_distributed", lambda: True)


WEIGHT, BIAS = "weight.grad", "bias.grad"  # of 12 and 3 elements


def joined(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([w.flatten(), b])


def copied_behind_each_other(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(20)
    buffer[2:14].copy_(w.view(-1))
    buffer[14:17].copy_(b)
    return buffer


def copied_together(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(20)
    torch._foreach_copy_([buffer[2:14], buffer[14:17]], [w.view(-1), b])
    return buffer


def scaled(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return joined(w, b).div_(2) * 3


def cast(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return joined(w, b).to(torch.float64)


def part(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return joined(w, b)[4:13].clone()


def filled_again(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    buffer = copied_behind_each_other(w, b)
    buffer[0:3].copy_(b)
    return buffer


def partly_zeroed(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    buffer = joined(w, b)
    buffer[5:12].zero_()
    return buffer


def overwritten_by_something_else(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    buffer = joined(w, b)
    buffer.copy_(torch.arange(15.0))
    return buffer


def joined_in_an_inner_dim(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([w, b[:, None]], 1)


def transposed(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return w.t().reshape(-1)


BEHIND = [Stretch(2, 14, WEIGHT), Stretch(14, 17, BIAS)]
FROM_START = [Stretch(0, 12, WEIGHT), Stretch(12, 15, BIAS)]


@pytest.mark.parametrize("roles", [[], ["output"]])
@pytest.mark.parametrize(
    ("fill", "held"),
    [
        (joined, FROM_START),
        (copied_behind_each_other, BEHIND),
        (copied_together, BEHIND),
        (scaled, FROM_START),
        (cast, FROM_START),
        (part, [Stretch(0, 8, WEIGHT, 4), Stretch(8, 9, BIAS)]),
        (
            filled_again,
            [Stretch(0, 3, BIAS), Stretch(3, 14, WEIGHT, 1), Stretch(14, 17, BIAS)],
        ),
        (partly_zeroed, [Stretch(0, 5, WEIGHT), Stretch(12, 15, BIAS)]),
        (overwritten_by_something_else, []),
        (joined_in_an_inner_dim, []),
        (transposed, []),
    ],
)
def test_what_a_buffer_holds_follows_the_copies(tmp_path, several_ranks, fill, held, roles):
    model = nn.Linear(4, 3)
    settings = {"level": "op", "output_dir": str(tmp_path / "run"), "roles": roles}
    with upguard_plugin.enable(model, None, settings) as g:
        model(torch.ones(2, 4)).sum().backward()

        buffer = fill(model.weight.grad, model.bias.grad)

        assert g.recorder.storages is not None
        assert list(stretches_of(g.recorder.storages, buffer)) == held
