"""Level `op` on a part of the run: what is recorded, and that the rest is followed all the same."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.capture.operator_run import calls_of, events_of, train
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.trace.reader import open_trace


class Writer(nn.Module):
    """Writes its input in place, where nobody records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x


class Reader(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer, self.lin = Reader(), Writer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.reader(x)
        kept = torch.empty_like(y)
        self.reader(y)
        self.writer(y)
        kept.copy_(y)
        return self.lin(self.reader(y) + self.reader(kept))


def test_only_selected_modules_are_recorded_and_writes_elsewhere_are_seen(tmp_path):
    run = train(tmp_path / "run", Net(), modules="reader")

    assert {(c.boundary, c.operator) for c in calls_of(run)} == {("reader", "aten.mul")}
    reads = [e.h for e in events_of(run) if e.role == "input" and e.phase == "forward"]
    assert len(reads) == 4
    assert reads[1] != reads[2] == reads[3]


def test_only_selected_phases_are_recorded(tmp_path):
    run = train(tmp_path / "run", nn.Linear(4, 4), phases="backward,optimizer")
    batch = open_trace(run).read(0, 0)
    assert {batch.key_of(row).phase for row in range(len(batch))} == {"backward", "optimizer"}
    assert {c.operator for c in calls_of(run)} >= {"aten.mm", "aten.add_"}


def test_steps_between_recorded_ones_leave_no_old_hash(tmp_path):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.state = torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.data.add_(1)
            return self.lin(x) + self.state

    every = train(tmp_path / "every", Counting(), steps=5)
    some = train(tmp_path / "some", Counting(), steps=5, steps_recorded="0,3-4")
    for step in (0, 3, 4):
        ours, theirs = ([(e.operator, e.h) for e in events_of(r, step)] for r in (some, every))
        assert ours == theirs


def test_the_parameters_of_a_selected_module_are_followed_into_the_optimizer(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = train(tmp_path / "run", model, modules="1")
    assert {c.boundary for c in calls_of(run) if c.phase == "optimizer"} == {"1.weight", "1.bias"}


def test_with_outputs_alone_the_outputs_are_those_of_a_full_recording(tmp_path):
    def forward(model, x):
        first, second = torch.unsafe_chunk(model(x), 2, dim=-1)  # views, though no schema says so
        added = torch.add(x, 1, out=torch.empty(2, 4))
        torch._foreach_add_([x[0], added[1]], 2.0)
        joined = torch.ops.aten._unsafe_view(added, [8])
        return torch.dropout(first + second, 0.5, True).sum() * joined.sum()

    model = nn.Linear(4, 4)
    runs = [
        train(tmp_path / name, copy.deepcopy(model), forward=forward, steps=2, **roles)
        for name, roles in (("full", {}), ("outputs", {"roles": ["output"]}))
    ]

    full, alone = ([e for e in events_of(run, 1) if e.role == "output"] for run in runs)
    assert [(e.operator, e.slot, e.h) for e in alone] == [(e.operator, e.slot, e.h) for e in full]
    assert not {"aten._unsafe_view", "aten.unsafe_split"} & {e.operator for e in full}


def test_nothing_is_hashed_outside_the_selection(tmp_path, monkeypatch):
    hashed = []
    take = FingerprintQueue.take

    def counting(queue):
        hashes = take(queue)
        hashed.append(len(hashes.h))
        return hashes

    def run(name, **settings):
        """How many hashes were taken in three steps, and how many events each has."""
        hashed.clear()
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        trace = open_trace(train(tmp_path / name, model, steps=3, **settings))
        return sum(hashed), [len(trace.read(0, entry.step)) for entry in trace.steps(0)]

    monkeypatch.setattr(FingerprintQueue, "take", counting)
    _, whole = run("all")
    of_step, events = run("step", steps_recorded="1")
    assert events == [whole[1]]
    assert of_step <= whole[1]
    for name, settings in {"module": {"modules": "1"}, "phase": {"phases": ["backward"]}}.items():
        taken, events = run(name, **settings)
        assert taken <= sum(events) < sum(whole) / 2
