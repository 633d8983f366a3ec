"""Every single result of a program of odd operators is corrupted, and is named.

Results of no element but one, of integers and bools, of 16 bits, complex, random, written in place,
through `out=` or without the schema saying so, recomputed, accumulated, never read.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import upguard_plugin
from tests.bugs.faults import CorruptedCalls
from tests.bugs.flipped_runs import TRAINING, Flips, Restart, can_be, corruption, results_of

PHASES = TRAINING | {"recompute", "accumulate"}
ALL = ("bit", "two", "strided", "row", "sign")


class Odd(nn.Module):
    """Indices are even in number, so that one with another last bit is in range."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.rnn, self.drop = nn.GRU(8, 8, batch_first=True), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(checkpoint(lambda h: self.fc(h).tanh(), x, use_reentrant=False)))
        x.max(dim=1)  # both are left
        values, places = x.topk(4, dim=1)
        order = x[:, 0].argsort()
        x = x.index_select(0, order) + values.mean() + places.sum()
        x = torch.where(x > 0.1, x, x * 0.5)
        with torch.no_grad():
            self.seen[::2].add_(x.detach()[0, ::2])
            self.seen.index_put_((torch.tensor([1, 2]),), torch.tensor(0.5), accumulate=True)
            scaled = torch.empty(8)
            torch.mul(self.seen, 2, out=scaled)
            noise = torch.empty(8).normal_() + torch.randperm(8) + torch.rand(8).bernoulli()
        x = x.mul(1)
        x[:, 0] = x[:, 1].detach() * noise
        turned = torch.fft.rfft(x, dim=1)
        x = x + torch.fft.irfft(turned * 1.5, n=8, dim=1) + noise * scaled
        x = x.bfloat16().mul(1.5).float()
        parts = torch.stack([part.t().contiguous().t() for part in x.split(2)])
        return self.rnn(parts)[0].cumsum(1).clamp(-3, 3)

    def loss(self, x: Tensor) -> Tensor:
        out = self(x)
        return out.logsumexp(dim=(1, 2)).square().mean() + out.abs().amax() + out.std()


def independent(output: Path, num: int, mode: Any = nullcontext) -> Path:
    """A run with `num` steps, besides the first, that do not depend on each other."""
    torch.manual_seed(0)
    model, restart = Odd(), Restart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    settings = {"level": "op", "output_dir": str(output), "program": output.name}
    with mode(), upguard_plugin.enable(model, optimizer, settings) as guard:
        for step in range(num + 1):
            restart(model, optimizer, step)
            x = torch.randn(8, 8, requires_grad=True)
            optimizer.zero_grad()
            guard.microbatch(0)
            model.loss(x).backward()
            guard.microbatch(1)
            model.fc(x).sum().backward()
            optimizer.step()
            guard.step()
    return output


@pytest.fixture(scope="module")
def flips(tmp_path_factory) -> tuple[Path, Flips]:
    """The clean run, and one with each result of a step corrupted in a step of its own."""
    folder = tmp_path_factory.mktemp("odd")
    one_step = [r for r in results_of(independent(folder / "two", 1), PHASES) if r.step == 1]
    num = len(one_step)
    clean = independent(folder / "clean", num)
    results = results_of(clean, PHASES)
    draw = random.Random(0)
    expected, corrupt = {}, []
    for step in range(1, num + 1):
        expected[step] = [one for one in results if one.step == step][step - 1]
        how = draw.choice([how for how in ALL if can_be(how, expected[step].key)])
        corrupt.append(corruption(expected[step], how))
    run = independent(folder / "faulty", num, partial(CorruptedCalls, corrupt, draw))
    return clean, Flips(run, expected)


def test_the_program_has_all_kinds_of_results(flips):
    keys = [one.key for one in flips[1].expected.values()]
    assert len(keys) > 200
    assert {key.phase for key in keys} == PHASES
    assert {key.dtype for key in keys} >= {"int64", "bool", "bfloat16", "complex64", "float32"}
    assert {key.slot for key in keys} >= {"out", "out.1", "args.0", "kwargs.out"}
    assert () in {key.shape for key in keys}
    modules = {"(outside)", "(root)", *(name for name, _ in Odd().named_modules())}
    in_modules = {key.boundary for key in keys if key.phase not in ("accumulate", "optimizer")}
    assert in_modules == modules - {""}


def test_every_result_is_named_where_it_is_corrupted(flips):
    clean, corrupted = flips
    assert corrupted.missed(clean) == []
