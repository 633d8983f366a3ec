"""What holds memory that nobody wrote is no value of the run, and never makes two runs differ."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.operator_run import events_of, train
from upguard_plugin.capture.operators.schema import SCRATCH_RESULTS, describe

ROOT = Path(__file__).resolve().parents[2]


class Sequence(nn.Module):
    """A recurrent layer and a loss that leave work space for their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x[:, None])
        scores = self.head(states).log_softmax(-1)
        return F.ctc_loss(scores, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]))


def slots_of(run: Path, operator: str, role: str) -> set[str]:
    return {e.slot for e in events_of(run) if (e.operator, e.role) == (operator, role)}


def test_work_space_is_not_recorded_neither_where_it_is_made_nor_where_it_is_read(tmp_path):
    run = train(tmp_path / "run", Sequence())

    assert slots_of(run, "aten.mkldnn_rnn_layer", "output") == {"out.0", "out.1", "out.2"}
    assert slots_of(run, "aten._ctc_loss", "output") == {"out.0"}
    for operator, work_space in (("mkldnn_rnn_layer_backward", 22), ("_ctc_loss_backward", 6)):
        read = slots_of(run, f"aten.{operator}", "input")
        assert "args.0" in read
        assert f"args.{work_space}" not in read


def test_what_attention_did_not_draw_is_work_space_by_its_name():
    flash = describe(torch.ops.aten._scaled_dot_product_flash_attention.default)
    returns = torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns

    assert {returns[place].name for place in flash.scratch} == {
        "rng_state",
        "unused",
        "debug_attn_mask",
    }
    for name, places in SCRATCH_RESULTS.items():
        assert describe(getattr(torch.ops.aten, name.partition("::")[2]).default).scratch == set(
            places
        )


def test_a_copy_of_memory_that_nobody_wrote_is_none_either(tmp_path):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        blank = torch.empty(2, 4)
        copied = blank.clone()
        kept = torch.zeros(2, 4)
        kept.copy_(copied)  # written over again before anybody reads it
        copied.copy_(x)
        return model(copied * 2)

    events = events_of(train(tmp_path / "run", nn.Linear(4, 4), forward=forward))

    assert not [e for e in events if e.operator == "aten.clone" and e.boundary == "(outside)"]
    copies = [e for e in events if e.operator == "aten.copy_" and e.boundary == "(outside)"]
    assert [(e.role, e.slot) for e in copies] == [("input", "args.1"), ("output", "args.0")]
    (read,) = [
        e for e in events if (e.operator, e.role, e.boundary) == ("aten.mul", "input", "(outside)")
    ]
    assert (read.h, read.producer) == (copies[1].h, "aten.copy_")


def read_by(run: Path, operator: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """(role, slot, shape) of the events of an operator outside of modules."""
    events = [e for e in events_of(run) if (e.operator, e.boundary) == (operator, "(outside)")]
    return [(e.role, e.slot, e.shape) for e in events]


def values_of(
    run: Path, operator: str
) -> list[tuple[str, str, tuple[tuple[int, int], ...] | None]]:
    """(role, slot, stretches of values) of the events of an operator outside of modules."""
    events = [e for e in events_of(run) if (e.operator, e.boundary) == (operator, "(outside)")]
    found = []
    for event in events:
        pieces = () if event.placement is None else event.placement.pieces
        values = tuple((p.local_start, p.local_start + p.sizes[0]) for p in pieces)
        found.append((event.role, event.slot, values or None))
    return found


def test_what_is_joined_with_memory_that_nobody_wrote_is_a_value_where_it_was_one(tmp_path):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        padded = torch.cat([x.flatten(), torch.empty(8)])
        padded.cumsum(0)  # reads the padding: a value is made of it
        padded[:8].cos()
        padded[6:10].tan()
        padded[8:].sin()
        torch.stack([x, torch.empty_like(x)], 2).exp()  # no part lies in one piece
        return model(torch.cat([x, x]))

    run = train(tmp_path / "run", nn.Linear(4, 4), forward=forward)

    assert [one for one in values_of(run, "aten.cat") if one[0] == "output"] == [
        ("output", "out", ((0, 8),)),
        ("output", "out", None),
    ]
    assert values_of(run, "aten.cumsum") == [
        ("input", "args.0", ((0, 8),)),
        ("output", "out", None),
    ]
    assert values_of(run, "aten.cos") == [("input", "args.0", None), ("output", "out", None)]
    assert values_of(run, "aten.tan") == [
        ("input", "args.0", ((0, 2),)),
        ("output", "out", ((0, 2),)),
    ]
    assert values_of(run, "aten.sin") == []
    assert values_of(run, "aten.exp") == [("output", "out", None)]


def test_a_blank_copy_makes_a_part_of_a_buffer_blank(tmp_path):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        buffer = torch.zeros(4, 4)
        buffer[2:].copy_(torch.empty(2, 4))
        buffer[:2].cos()
        buffer[1:].sin()
        buffer[2:].copy_(x)
        return model(buffer.tan())

    run = train(tmp_path / "run", nn.Linear(4, 4), forward=forward)

    assert values_of(run, "aten.cos") == [("input", "args.0", None), ("output", "out", None)]
    assert values_of(run, "aten.sin") == [
        ("input", "args.0", ((0, 4),)),
        ("output", "out", ((0, 4),)),
    ]
    assert values_of(run, "aten.tan") == [("input", "args.0", None), ("output", "out", None)]


def test_padding_stays_padding_where_operators_work_element_by_element(tmp_path):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        flat = torch.empty(10)
        flat[:8] = x.flatten()
        half = (flat / 2).to(torch.bfloat16)
        moments = torch.zeros(10)
        torch._foreach_add_([moments, torch.ones(10)], [half.float(), torch.ones(10)])
        torch._foreach_norm([moments])
        flat.add_(moments)
        kept = torch.ones(10)
        kept.copy_(flat)
        kept.tan()
        flat.zero_()
        flat.sin()
        return model(x)

    run = train(tmp_path / "run", nn.Linear(4, 4), forward=forward)

    real = ((0, 8),)
    for operator, wanted in {
        "aten.div": [("input", "args.0", real), ("output", "out", real)],
        "aten._foreach_add_": [
            ("input", "args.0.0", None), ("input", "args.0.1", None),
            ("input", "args.1.0", real), ("input", "args.1.1", None),
            ("output", "args.0.0", real), ("output", "args.0.1", None),
        ],
        "aten._foreach_norm": [("input", "args.0.0", real), ("output", "out.0", None)],
        "aten.tan": [("input", "args.0", real), ("output", "out", real)],
        "aten.sin": [("input", "args.0", None), ("output", "out", None)],
    }.items():  # fmt: skip
        assert values_of(run, operator) == wanted, operator


def test_what_is_computed_from_memory_that_nobody_wrote_at_all_is_a_value(tmp_path):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        torch.empty(2, 4).maximum(x)
        return model(x)

    run = train(tmp_path / "run", nn.Linear(4, 4), forward=forward)

    assert values_of(run, "aten.maximum") == [("input", "args.1", None), ("output", "out", None)]


class AddsItself(torch.autograd.Function):
    """Its backward adds to the weight's accumulator and returns a stand-in, as Megatron's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if hasattr(weight, "main_grad"):
            weight.main_grad.add_(x * grad)
            weight.grad_added_to_main_grad = True
        return weight * grad, torch.empty_like(weight)


@pytest.mark.parametrize("adds", [True, False])
def test_a_stand_in_for_a_gradient_is_no_value(tmp_path, adds):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        weight = nn.Parameter(torch.ones(2, 4))
        if adds:
            weight.main_grad = torch.zeros(2, 4)
        return model(AddsItself.apply(x.requires_grad_(), weight))

    run = train(tmp_path / "run", nn.Linear(4, 4), forward=forward)

    made = {e.slot for e in events_of(run) if (e.operator, e.phase, e.role) == (
        "autograd.AddsItself", "backward", "output"
    )}  # fmt: skip
    assert made == ({"out.0"} if adds else {"out.0", "out.1"})


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc fills memory")
def test_no_operator_of_torch_returns_memory_that_nobody_wrote():
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "tests.capture.poisoned_results"], cwd=ROOT, check=True,
                env=os.environ | {"MALLOC_PERTURB_": byte, "OMP_NUM_THREADS": "1"},
                capture_output=True, timeout=900,
            ).stdout
        )
        for byte in ("85", "170")
    ]  # fmt: skip

    assert len(found[0]) == len(found[1]) > 5000
    assert {tuple(one[:2]) for one, two in zip(*found, strict=True) if one != two} == set()
