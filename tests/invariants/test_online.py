"""Invariants checked while a rank trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import upguard_plugin
from tests.cases import case_21
from tests.cases.case import record
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.compare.selection import Selection
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace


def notes(run: Path) -> list[str]:
    return [note for note in open_trace(run).end(0).notes if note.startswith("BROKEN")]


def recorded(variant: str, run: Path, check: int) -> Path:
    def train(name, config):
        case_21.CASE.train(name, {**config, "check": check})

    return record(replace(case_21.CASE, train=train), variant, run)


def test_what_breaks_is_printed_in_one_line_and_noted(tmp_path, capfd):
    found = notes(recorded("target", tmp_path / "run", 1))

    assert found[0].startswith(
        "BROKEN at step 0, micro-batch 0, recompute, rank 0: recompute-repeats: Random state of "
        "blocks.1.drop is not what it was"
    )
    lines = [line for line in capfd.readouterr().err.splitlines() if "BROKEN" in line]
    assert lines[0].startswith(f"upguard: {found[0]}")
    assert all("step 0" in line or "step 1" in line for line in lines) and len(lines) <= 2


def test_a_clean_run_is_silent(tmp_path, capfd):
    assert notes(recorded("twin", tmp_path / "run", 1)) == []
    assert "BROKEN" not in capfd.readouterr().err


@pytest.mark.parametrize(("interval", "step"), [(0, None), (3, None), (2, 2)])
def test_only_every_nth_step_is_looked_at(tmp_path, interval, step):
    class Forgetful(nn.Module):
        """Its weight is overwritten in a step, after the step's start."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.spoil = False

        def forward(self, x):
            if self.spoil:
                self.inner.weight.data.add_(1)
            return self.inner(x)

    model = Forgetful()
    config = {"output_dir": str(tmp_path / "run"), "check": interval}
    with upguard_plugin.enable(model, None, config) as guard:
        for k in range(3):
            model.spoil = k == 2
            model(torch.ones(1, 2)).sum().backward()
            guard.step()

    assert [note.split(",")[0] for note in notes(tmp_path / "run")] == (
        [] if step is None else [f"BROKEN at step {step}"]
    )


class Idle(torch.optim.SGD):
    """Does not step."""

    def step(self, closure=None) -> None:
        pass


def train_and_evaluate(run: Path, kind: str) -> None:
    """Four steps, an evaluation behind the third; with a fault that several steps tell."""
    model = nn.Linear(2, 2)
    optimizer = (Idle if kind == "idle" else torch.optim.SGD)(model.parameters(), lr=0.1)
    with upguard_plugin.enable(model, optimizer, {"output_dir": str(run), "check": 100}) as guard:
        for k in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if k == 2:
                model.eval()(torch.ones(1, 2))
                model.train()
            if k == 2 and kind == "forgetful":
                model.weight.data.mul_(2)
            guard.step()


@pytest.mark.parametrize(
    ("kind", "told"),
    [("forgetful", {"eval-leaves-weights"}), ("idle", {"weights-move"}), ("", set())],
)
def test_what_only_several_steps_tell_is_checked_in_every_step(tmp_path, kind, told):
    train_and_evaluate(tmp_path / "run", kind)

    assert {note.split(": ")[1] for note in notes(tmp_path / "run")} == told
    offline = check_run(open_trace(tmp_path / "run"), Selection()).broken
    assert {one.invariant for one in offline} == told


def test_a_check_that_fails_does_not_reach_the_training(tmp_path):
    class Writer:
        stopped = None

        def __init__(self) -> None:
            self.batches, self.notes = [], []

        def write(self, batch) -> None:
            self.batches.append(batch)

        def note(self, sentence) -> None:
            self.notes.append(sentence)

        def close(self, reason="") -> None:
            self.reason = reason

    def fails(batch) -> None:
        raise RuntimeError("no")

    writer = Writer()
    recorder = Recorder(writer, FingerprintQueue())
    recorder.writing.on_batch = fails
    for _ in range(2):
        recorder.record("x", torch.ones(2), role="output")
        recorder.finish_step()
    recorder.close()

    assert len(writer.batches) == 2 and writer.reason == ""
    assert writer.notes == ["the online check ended: RuntimeError: no"]
