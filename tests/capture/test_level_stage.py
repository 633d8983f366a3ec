"""What level `stage` sees of a training on one rank: weights twice a step, all else once."""

from __future__ import annotations

import torch
from torch import nn

import upguard_plugin
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.trace.reader import open_trace


def seen(run, steps: str = "") -> dict[int, set[tuple[str, str]]]:
    """Of each recorded step the phases and roles of its tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {"output_dir": str(run), "level": "stage"} | ({"steps": steps} if steps else {})
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for _ in range(4):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
    trace = open_trace(run)
    found = {}
    for entry in trace.steps(0):
        batch = trace.read(0, entry.step)
        keys = [batch.key_of(row) for row in range(len(batch))]
        found[entry.step] = {(key.phase, key.role) for key in keys}
    return found


EVERY_STEP = {
    ("data", "data"), ("data", "sample"), ("start", "param"), ("start", "buffer"), ("start", "rng"),
    ("start", "scalar"), ("optimizer", "scalar"), ("optimizer", "param"), ("optimizer", "rng"),
    ("forward", "buffer"),
}  # fmt: skip


def test_states_of_optimizers_are_recorded_where_recording_begins(tmp_path):
    found = seen(tmp_path / "run", "1,3")

    state = {("start", "optimizer_state")}
    assert found == {1: EVERY_STEP | state, 3: EVERY_STEP | state}


def test_weights_are_recorded_in_every_step(tmp_path):
    # The first step begins without any state.
    assert seen(tmp_path / "run") == dict.fromkeys(range(4), EVERY_STEP)


def test_a_run_that_is_recorded_later_is_compared_all_the_same(tmp_path):
    seen(tmp_path / "baseline")
    seen(tmp_path / "target", "2-3")

    runs = [open_trace(tmp_path / name) for name in ("baseline", "target")]
    verdict = compare_runs(*runs, Selection.parse(steps="2-3"), same_program=True)

    assert (verdict.verdict, verdict.coverage.unmatched_target) == ("identical", 0)
