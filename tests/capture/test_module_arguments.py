"""Arguments and outputs of modules, taken apart into tensors, numbers and text."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from module_run import recorded_modules
from torch import nn


@dataclass
class Options:
    mask: torch.Tensor
    ratio: float


Pair = namedtuple("Pair", "first second")


class Nested(nn.Module):
    def forward(self, x, options, *, pair, extra=None, mode="fast", flags=()):
        return OrderedDict(hidden=x * options.mask, pair=Pair(pair.first, [pair.second, 3]))


def test_nested_arguments_and_outputs_are_taken_apart(tmp_path):
    model = Nested()
    options = Options(torch.ones(2), 0.5)
    pair = Pair(torch.zeros(1), {"deep": torch.zeros(2)})

    def step(guard):
        model(torch.ones(2), options, pair=pair, flags=[True, 2], extra=None)

    run = recorded_modules(tmp_path / "run", model, step)

    assert [(e.slot, e.dtype, e.shape) for e in run.events] == [
        ("args.0", "float32", (2,)),
        ("args.1.mask", "float32", (2,)),
        ("args.1.ratio", "float64", ()),
        ("kwargs.pair.first", "float32", (1,)),
        ("kwargs.pair.second.deep", "float32", (2,)),
        ("kwargs.flags.0", "bool", ()),
        ("kwargs.flags.1", "int64", ()),
        ("kwargs.extra", "none", (0,)),
        ("out.hidden", "float32", (2,)),
        ("out.pair.first", "float32", (1,)),
        ("out.pair.second.0.deep", "float32", (2,)),
        ("out.pair.second.1", "int64", ()),
    ]


class Cache:
    """A class the probe knows nothing of."""


class Opaque(nn.Module):
    def forward(self, x, cache):
        return x


def test_what_cannot_be_looked_into_is_said(tmp_path):
    model = Opaque()
    run = recorded_modules(
        tmp_path / "run", model, lambda guard: model(torch.ones(1), cache=Cache())
    )
    assert run.end.notes == ("arguments of class Cache were not recorded",)


def test_one_tensor_without_bytes_does_not_end_the_recording(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    run = recorded_modules(
        tmp_path / "run", model, lambda guard: model(torch.ones(2, device="meta"))
    )
    assert run.end.complete
    assert run.events == []
    assert {note.split(" was ")[0] for note in run.end.notes} >= {
        "a tensor of (root)",
        "a tensor of 0",
        "a tensor of 1",
    }


@pytest.mark.parametrize(
    "value, recorded, note",
    [
        (torch.eye(3).to_sparse(), [("float32", (3, 3))], ""),
        (torch.ones(2, dtype=torch.complex64).conj(), [("complex64", (2,))], ""),
        (torch.empty(0), [("float32", (0,))], ""),
        (torch.ones(2, 2, dtype=torch.float8_e4m3fn), [("float8_e4m3fn", (2, 2))], ""),
        (torch.ones(2, 3).t(), [("float32", (3, 2))], ""),
        (float("nan"), [("float64", ())], ""),
        (10**30, [("int", (25,))], ""),
        (None, [("none", (0,))], ""),
        ("left", [("str", (4,))], ""),
        (range(3), [], "arguments of class range were not recorded"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            [],
            "a nested tensor of (root) was not recorded",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_odd_arguments_are_recorded_or_said(tmp_path, value, recorded, note):
    model = nn.Identity()
    run = recorded_modules(tmp_path / "run", model, lambda guard: model(value))
    assert [(e.dtype, e.shape) for e in run.find(role="input")] == recorded
    assert run.end.complete
    assert (note in run.end.notes) == bool(note)
