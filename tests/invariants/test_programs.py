"""Real programs on one process: none of what they mean to do is called broken, and bugs are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import upguard_plugin
from tests.cases import case_17, case_21
from tests.cases.case import record
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

STEPS = 4


def check(run: Path):
    return check_run(open_trace(run), Selection())


def guarded(model, optimizers, run: Path, level: str, **settings):
    torch.manual_seed(0)
    config = {"output_dir": str(run), "level": level, **settings}
    return upguard_plugin.enable(model, optimizers, config)


def residual(run: Path, level: str) -> None:
    """Additions in place between modules, batch norm, two micro-batches, evaluation."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.norm(self.fc(x))
            out += x
            return self.act(out)

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with guarded(model, optimizer, run, level) as guard:
        for _ in range(STEPS):
            for k in range(2):
                guard.microbatch(k)
                model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            model(torch.randn(4, 8))
            model.train()
            guard.step()


def clamped_critic(run: Path, level: str) -> None:
    """Two optimizers that take turns; one's weights are clamped by the program."""
    critic, maker = nn.Linear(4, 1), nn.Linear(2, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, maker)]
    with guarded([critic, maker], optimizers, run, level, weights_in_use="all") as guard:
        for _ in range(STEPS):
            for optimizer, sign in zip(optimizers, (1, -1), strict=True):
                (sign * critic(maker(torch.randn(3, 2)))).mean().backward()
                optimizer.step()
                critic.zero_grad()
                maker.zero_grad()
                with torch.no_grad():
                    for parameter in critic.parameters():
                        parameter.clamp_(-0.1, 0.1)
            guard.step()


def averaged(run: Path, level: str) -> None:
    """A teacher that follows, and an evaluation with averaged weights that are put back."""
    model = nn.ModuleDict({"student": nn.Linear(4, 4), "teacher": nn.Linear(4, 4)})
    model["teacher"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["student"].parameters())
    average = copy.deepcopy(model["student"].state_dict())
    with guarded(model, optimizer, run, level) as guard:
        for _ in range(STEPS):
            x = torch.randn(3, 4)
            (model["student"](x) - model["teacher"](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
            with torch.no_grad():
                for ours, theirs in zip(*(m.parameters() for m in model.values()), strict=True):
                    theirs.lerp_(ours, 0.1)
                kept = copy.deepcopy(model["student"].state_dict())
                model["student"].load_state_dict(average)
                model.eval()["student"](x)
                model.train()["student"].load_state_dict(kept)


def recomputed(run: Path, level: str) -> None:
    """One module in two checkpointed regions, with dropout, over interleaved micro-batches."""
    shared = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    with guarded(shared, optimizer, run, level) as guard:
        for _ in range(STEPS):
            losses = []
            for k in range(3):
                guard.microbatch(k)
                x = torch.randn(3, 4, requires_grad=True)
                for _ in range(2):
                    x = checkpoint(shared, x, use_reentrant=False)
                losses.append(x.square().mean())
                if k:
                    losses.pop(0).backward()
            losses.pop().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()


def frozen_and_tied(run: Path, level: str) -> None:
    """A frozen layer, a tied one, one that is not used, one that no optimizer has, warm-up."""
    model = nn.ModuleDict(
        {name: nn.Linear(4, 4) for name in ("frozen", "a", "b", "unused", "forgotten")}
    )
    model["frozen"].requires_grad_(False)
    model["b"].weight = model["a"].weight
    chosen = [*model["a"].parameters(), model["b"].bias, *model["unused"].parameters()]
    optimizer = torch.optim.AdamW(chosen, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with guarded(model, optimizer, run, level) as guard:
        for _ in range(STEPS):
            x = torch.randn(3, 4)
            for name in ("frozen", "a", "b", "forgotten"):
                x = model[name](x)
            x.square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            guard.step()


def masters(run: Path, level: str) -> None:
    """bfloat16 weights with masters."""
    model = nn.Linear(4, 4).bfloat16()
    kept = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(kept, lr=0.01)
    with guarded(model, optimizer, run, level) as guard:
        for _ in range(STEPS):
            model(torch.randn(3, 4).bfloat16()).square().mean().backward()
            for master, weight in zip(kept, model.parameters(), strict=True):
                master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, weight in zip(kept, model.parameters(), strict=True):
                    weight.copy_(master)
            guard.step()


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("program", "applied"),
    [
        (residual, "weights-move"),
        (clamped_critic, "weights-in-use"),
        (averaged, "weights-in-use"),
        (recomputed, "recompute-repeats"),
        (frozen_and_tied, "frozen-stay"),
        (masters, "masters-round"),
    ],
)
def test_what_a_program_means_to_do_is_not_broken(tmp_path, program, applied, level):
    program(tmp_path / "run", level)

    report = check(tmp_path / "run")

    assert [one.explanation for one in report.broken] == []
    assert report.checked[applied] > 0


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        (case_21, ("recompute-repeats", 0, "recompute", "blocks.1.drop")),
        (case_17, ("masters-round", 0, "start", "embed.weight")),
    ],
)
def test_a_public_bug_is_found_in_the_faulty_run_alone(tmp_path, case, answer):
    faulty = check(record(case.CASE, "target", tmp_path / "target")).broken[0]
    twin = check(record(case.CASE, "twin", tmp_path / "twin"))

    assert (faulty.invariant, faulty.step, faulty.phase, faulty.boundary) == answer
    assert twin.broken == [] and twin.checked[answer[0]] > 0
