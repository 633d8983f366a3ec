"""A short training at level `op`, and the operator calls that its trace has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import upguard_plugin
from upguard_plugin.records import Placement
from upguard_plugin.trace.batch import NONE
from upguard_plugin.trace.reader import open_trace


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, without its tensors."""

    phase: str
    boundary: str
    operator: str
    call: int


@dataclass(frozen=True)
class OperatorEvent:
    """One tensor of an operator call."""

    phase: str
    boundary: str
    operator: str
    call: int
    role: str
    slot: str
    moment: str | None
    h: int
    producer: str | None  # operator of the event that wrote it
    shape: tuple[int, ...]
    placement: Placement | None


def train(
    output: Path,
    model: nn.Module,
    *,
    steps: int = 1,
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    steps_recorded: str | None = None,
    **config: Any,
) -> Path:
    """SGD steps on a batch of shape [2, 4], recorded at level op; returns the run."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"level": "op", "output_dir": str(output), "steps": steps_recorded} | config
    with upguard_plugin.enable(model, optimizer, settings) as guard:
        for step in range(steps):
            x = torch.linspace(0, 1, 8).view(2, 4) + step
            optimizer.zero_grad()
            y = model(x) if forward is None else forward(model, x)
            y.sum().backward()
            optimizer.step()
            guard.step()
    if settings.get("enabled", True):
        end = open_trace(output).end(0)
        assert end.complete, end.reason
    return output


def events_of(run: Path, step: int = 0) -> list[OperatorEvent]:
    """The events of operators (also named boundaries like `autograd.Function`), in order."""
    batch = open_trace(run).read(0, step)
    rows = {int(seq): row for row, seq in enumerate(batch.seq)}
    found = []
    for row in range(len(batch)):
        key = batch.key_of(row)
        if key.operator is None or "." not in key.operator:
            continue
        seq = NONE if batch.producer is None else int(batch.producer[row])
        producer = batch.key_of(rows[seq]).operator if seq in rows else None
        found.append(
            OperatorEvent(
                key.phase, key.boundary, key.operator, int(batch.call[row]), key.role, key.slot,
                key.moment, int(batch.h[row]), producer, key.shape, key.placement,
            )
        )  # fmt: skip
    return found


def calls_of(run: Path, step: int = 0) -> list[OperatorCall]:
    """Operator calls in program order, each once."""
    calls: list[OperatorCall] = []
    for event in events_of(run, step):
        call = OperatorCall(event.phase, event.boundary, event.operator, event.call)
        if not calls or calls[-1] != call:
            calls.append(call)
    return calls
