"""A program that runs one operator more, one less or another one: level `op` names it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import upguard_plugin
from tests.bugs.training import compare
from upguard_plugin.cli import upguard

Edit = Callable[[Tensor], Tensor]
NUM_STEPS = 2


def same(h: Tensor) -> Tensor:
    return h


class Half(torch.autograd.Function):
    """Forward hands on what it gets, backward half of it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Block(nn.Module):
    """`first` and `last` change what enters the activation and what leaves the block."""

    def __init__(self, first: Edit, activation: Edit, last: Edit) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.first, self.activation, self.last = first, activation, last

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first(self.fc1(x)))
        for scale in (1.25, 0.75):
            h = h * scale
        return x + self.last(self.fc2(h))


def record(
    output: Path,
    first: Edit = same,
    activation: Edit = F.gelu,
    last: Edit = same,
    loss_of: Edit = same,
    before_update: Callable[[nn.Module], None] = lambda model: None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    capture: dict[str, object] | None = None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: bool,
) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(
        Block(same, F.gelu, same), Block(first, activation, last), Block(same, F.gelu, same)
    )
    optimizer = optimizer_class(model.parameters(), lr=0.1, **({"foreach": False} | options))
    config = {"level": "op", "output_dir": str(output), "program": output.name} | (capture or {})
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = loss_of(model(x).square().mean())
            guard.scalar("loss", loss)
            loss.backward()
            with torch.no_grad():
                before_update(model)
            optimizer.step()
            guard.step()
            with torch.no_grad():
                after_step(model)
    return output


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("clean") / "clean")


def found(clean: Path, faulty: Path) -> dict:
    verdict = compare(clean, faulty)
    assert verdict["first_divergence"] is not None, verdict["notes"]
    return verdict["first_divergence"]


def test_the_same_program_again_is_identical(clean, tmp_path):
    assert compare(clean, record(tmp_path / "again"))["verdict"] == "identical"


def doubled_in_backward(h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def rolled(h: Tensor) -> Tensor:
    return h.view(4, 4, 4).transpose(1, 2).reshape(4, 16)


def written_in_place(h: Tensor) -> Tensor:
    h.data.mul_(1.5)
    return h


def decayed(model: nn.Module) -> None:
    model[1].fc1.weight.mul_(0.99)


def scaled_gradient(model: nn.Module) -> None:
    model[1].fc1.weight.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("edits", "answer"),
    [
        ({"first": lambda h: h * 1.5}, ("extra", "1", "aten.mul", "forward")),
        ({"first": lambda h: h * 0}, ("extra", "1", "aten.mul", "forward")),
        ({"first": written_in_place}, ("extra", "1", "aten.mul_", "forward")),
        ({"first": lambda h: h * torch.full((16,), 1.5)}, ("extra", "1", "aten.mul", "forward")),
        ({"first": lambda h: h.bfloat16().float()}, ("extra", "1", "aten._to_copy", "forward")),
        ({"first": rolled}, ("extra", "1", "aten.clone", "forward")),
        ({"activation": same}, ("missing", "1", "aten.gelu", "forward")),
        ({"activation": F.silu}, ("replaced", "1", "aten.gelu", "forward")),
        ({"last": lambda h: h.detach() * 1.5}, ("extra", "1", "aten.mul", "forward")),
        ({"last": doubled_in_backward}, ("extra", "1.fc2", "aten.mul", "backward")),
        ({"last": Half.apply}, ("extra", "1", "aten.mul", "backward")),
        ({"loss_of": lambda loss: loss / 2}, ("extra", "(outside)", "aten.div", "loss")),
        ({"before_update": scaled_gradient}, ("extra", "(outside)", "aten.mul_", "backward")),
        ({"before_update": decayed}, ("extra", "(outside)", "aten.mul_", "backward")),
        ({"after_step": decayed}, ("extra", "(outside)", "aten.mul_", "start")),
    ],
)
def test_an_operator_of_one_run_is_named_where_it_makes_the_difference(
    clean, tmp_path, edits, answer
):
    first = found(clean, record(tmp_path / "other", **edits))

    how = None if first["change"] is None else first["change"]["how"]
    assert (how, first["boundary"], first["operator"], first["phase"]) == answer
    assert first["inputs_equal"] is True
    assert first["source"]["file"].endswith("test_other_operators.py")
    assert first["step"] == (1 if answer[3] == "start" else 0)
    kinds = {"loss": "forward", "start": "optimizer"}
    assert first["kind"] == kinds.get(answer[3], answer[3])


def test_an_operator_that_draws_in_one_run_only_is_rng(clean, tmp_path):
    first = found(clean, record(tmp_path / "dropout", first=F.dropout))

    assert (first["change"]["how"], first["boundary"], first["kind"]) == ("extra", "1", "rng")
    assert "aten.bernoulli_" in {event["operator"] for event in first["change"]["target"]}


class Decaying(torch.optim.SGD):
    """Its update begins with a decay that its settings do not tell."""

    @torch.no_grad()
    def step(self, closure=None):
        torch._foreach_mul_(self.param_groups[0]["params"], 0.99)
        super().step(closure)


def test_an_operator_of_the_optimizer_that_one_run_has_is_named(clean, tmp_path):
    first = found(clean, record(tmp_path / "decaying", optimizer_class=Decaying))

    assert (first["change"]["how"], first["operator"]) == ("extra", "aten._foreach_mul_")
    assert (first["boundary"], first["phase"]) == ("0.fc1.weight", "optimizer")
    assert (first["kind"], first["inputs_equal"]) == ("optimizer", True)


def test_another_implementation_of_the_optimizer_is_named_where_it_rounds_otherwise(tmp_path):
    plain = record(tmp_path / "plain", optimizer_class=torch.optim.AdamW)
    fused = record(tmp_path / "fused", optimizer_class=torch.optim.AdamW, foreach=None, fused=True)
    foreach = record(tmp_path / "foreach", optimizer_class=torch.optim.AdamW, foreach=True)

    first = found(plain, fused)
    assert (first["change"]["how"], first["phase"]) == ("replaced", "optimizer")
    assert [event["operator"] for event in first["change"]["target"]] == ["aten._fused_adamw_"]
    assert found(plain, foreach)["kind"] == "structure"  # another setting, and equal values


def test_what_computes_the_same_is_structure_and_no_value_is_blamed(clean, tmp_path):
    first = found(clean, record(tmp_path / "copied", first=lambda h: h.clone()))

    assert (first["kind"], first["change"]) == ("structure", None)


def test_the_elements_shown_are_those_of_the_first_pair_that_differs(tmp_path):
    capture = {"dump": {"boundary": "1", "steps": "0"}}
    runs = [
        record(tmp_path / "clean", capture=capture),
        record(tmp_path / "extra", first=lambda h: h * 1.5, capture=capture),
    ]

    text = CliRunner().invoke(upguard, ["compare", *map(str, runs)]).output

    (shown,) = [line for line in text.splitlines() if "elements" in line]
    command = shlex.split(shown)[2:]
    assert command[-1] == "step 0 forward 1 aten.gelu call 0 input args.0"
    diff = CliRunner().invoke(upguard, command)
    assert (diff.exit_code, "all elements" in diff.output) == (0, True), diff.output


def test_where_only_a_part_is_recorded_only_what_is_seen_is_claimed(tmp_path):
    """The operator lies in block 1: where that is not recorded, nothing is said of operators."""
    runs = {}
    for modules in ("1", "2"):
        capture = {"modules": [modules]}
        runs[modules] = found(
            record(tmp_path / f"clean{modules}", capture=capture),
            record(tmp_path / f"extra{modules}", first=lambda h: h * 1.5, capture=capture),
        )

    assert (runs["1"]["operator"], runs["1"]["change"]["how"]) == ("aten.mul", "extra")
    assert (runs["2"]["boundary"], runs["2"]["role"]) == ("2", "input")
    assert runs["2"]["change"] is None


def test_without_recorded_inputs_nothing_is_claimed(tmp_path):
    capture = {"roles": ["output"]}
    first = found(
        record(tmp_path / "clean", capture=capture),
        record(tmp_path / "extra", first=lambda h: h * 1.5, capture=capture),
    )

    assert (first["boundary"], first["role"], first["change"]) == ("1", "output", None)
    assert first["inputs_equal"] is None
