"""A short training of the GPT with capture on, and the verdict on two of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner

import upguard_plugin
from tests.bugs.gpt import GPT
from upguard_plugin.cli import upguard

NUM_STEPS = 3
BATCH = 4

# What a fault may do to a training, by the moment: (model, optimizer, step) -> None.
Deed = Callable[[GPT, torch.optim.Optimizer, int], None]


def nothing(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The deed of a clean run."""


def record(
    output: Path,
    *,
    level: str = "module",
    num_steps: int = NUM_STEPS,
    adamw: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
    before_step: Deed = nothing,
    after_update: Deed = nothing,
    tokens_of: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, tokens: tokens,
    **model_options: Any,
) -> Path:
    """Train and return the run. The faults' hooks say when they are called."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    model = GPT(**model_options)
    optimizer = torch.optim.AdamW(model.parameters(), **(adamw or {"foreach": False}))
    draws = torch.Generator().manual_seed(2)
    with (
        mode(),
        upguard_plugin.enable(
            model,
            optimizer,
            {"level": level, "output_dir": str(output), "program": output.name} | (config or {}),
        ) as guard,  # fmt: skip
    ):
        for step in range(num_steps):
            shape = (BATCH, model.length + 1)
            text = torch.randint(0, model.vocabulary, shape, generator=draws)
            tokens = tokens_of(step, text[:, :-1].clone())
            before_step(model, optimizer, step)
            optimizer.zero_grad()
            loss = model.loss(tokens, text[:, 1:])
            guard.scalar("loss", loss)
            loss.backward()
            optimizer.step()
            after_update(model, optimizer, step)
            guard.step()
    return output


def compare(baseline: Path, target: Path, *options: str) -> dict[str, Any]:
    """The verdict of `upguard compare --format json`."""
    result = CliRunner().invoke(
        upguard, ["compare", str(baseline), str(target), "--format", "json", *options]
    )
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


def found(verdict: dict[str, Any], *fields: str) -> tuple[Any, ...]:
    """Some fields of the first divergence."""
    first = verdict["first_divergence"]
    assert first is not None, "the runs were called identical"
    return tuple(first[field] for field in fields)
