"""Tensors without a shape or without memory: recorded or said not to be, and never in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from tests.bugs.training import compare
from tests.capture.operator_run import train
from upguard_plugin.trace.reader import open_trace

Forward = Callable[[nn.Module, Tensor], Tensor]


def nested(layout: torch.layout) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([x[:1], x], layout=layout)
        return torch.nested.to_padded_tensor(model(ragged), 0.0)

    return forward


def with_tangents(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x + 1))).tangent
    return model(x) + tangent.detach()


def with_transforms(model: nn.Module, x: Tensor) -> Tensor:
    _, change = torch.func.jvp(model, (x,), (x + 1,))
    jacobian = torch.func.jacrev(model)(x[0])
    return model(x) + change.detach() + jacobian.detach().sum()


def quantised(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y + torch.quantize_per_tensor(y.detach(), 0.1, 3, torch.quint8).dequantize()


def overlapping(model: nn.Module, x: Tensor) -> Tensor:
    far = torch.zeros(1 << 16).as_strided((2, 4), (1 << 14, 1 << 10))
    far.copy_(x)
    return model(far + x.as_strided((2, 4), (1, 1)) + torch.zeros(1).expand(2, 4) + x[:, :0].sum())


FORWARDS: dict[str, tuple[Forward, set[str]]] = {
    "nested": (nested(torch.strided), {"a nested tensor of (root) was not recorded"}),
    "jagged": (nested(torch.jagged), {"a nested tensor of (root) was not recorded"}),
    "tangents": (with_tangents, set()),
    "transforms": (
        with_transforms, {"module calls inside vmap, grad or jvp were not recorded"}
    ),
    "quantised": (quantised, set()),
    "overlapping": (overlapping, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_a_run_with_odd_tensors_is_complete_and_repeats(tmp_path: Path, name: str) -> None:
    forward, notes = FORWARDS[name]
    runs = []
    for side in ("baseline", "target"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        runs.append((train(tmp_path / side, model, steps=2, forward=forward), model))
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        forward(plain, torch.linspace(0, 1, 8).view(2, 4) + step).sum().backward()
        optimizer.step()

    end = open_trace(runs[0][0]).end(0)
    assert end.complete, end.reason
    assert notes <= set(end.notes)
    assert compare(runs[0][0], runs[1][0])["verdict"] == "identical"
    assert torch.equal(runs[0][1].weight, plain.weight)
