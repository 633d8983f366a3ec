"""Saving and loading of Megatron-LM, told by a fake of its module `training`."""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import upguard_plugin
from upguard_plugin.compare.selection import Selection
from upguard_plugin.integrations.megatron.checkpoints import CheckpointProbe
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace


class Program:
    """A model, an optimizer, and the functions of `megatron.training.training`."""

    def __init__(self, forgets: str = "") -> None:
        """forgets: what a load leaves as it is: "samples", "rng" or a slot of the optimizer."""
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.args = SimpleNamespace(save="here", load="here", iteration=0, consumed_train_samples=0)
        self.forgets = forgets
        self.saved = {}
        self.training = ModuleType("megatron.training.training")
        self.training.get_args = lambda: self.args
        self.training.save_checkpoint = self.save
        self.training.load_checkpoint = self.load

    def save(self, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        states = model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()
        self.saved[iteration] = copy.deepcopy((*states, self.args.consumed_train_samples))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        iteration = max(self.saved, default=0)
        if not iteration:
            return 0, 0
        weights, moments, rng, samples = copy.deepcopy(self.saved[iteration])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
        for parameter, number in zip(model.parameters(), moments, strict=True):
            for slot, value in moments[number].items():
                if slot != self.forgets:
                    optimizer.state[parameter][slot].copy_(value)
        if self.forgets != "rng":
            torch.set_rng_state(rng)
        if self.forgets != "samples":
            self.args.consumed_train_samples = samples
        return iteration, 0

    def step(self, guard: upguard_plugin.Guard) -> None:
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        guard.step()
        self.args.consumed_train_samples += 3

    def train(self, run: str) -> None:
        """A step, a save, a step, a load, a step."""
        with upguard_plugin.enable(self.model, self.optimizer, {"output_dir": run}) as guard:
            probe = CheckpointProbe(guard, self.training)
            probe.attach()
            self.step(guard)
            self.training.save_checkpoint(1, self.model, self.optimizer)
            self.step(guard)
            self.training.load_checkpoint(self.model, self.optimizer)
            self.step(guard)
            probe.detach()
        assert self.training.save_checkpoint == self.save


@pytest.mark.parametrize(
    ("forgets", "role", "boundary"),
    [
        ("", None, None),
        ("exp_avg", "optimizer_state", "weight"),
        ("step", "optimizer_state", "weight"),
        ("samples", "scalar", "consumed_train_samples"),
        ("rng", "rng", "rng.torch_cpu"),
    ],
)
def test_what_a_load_leaves_behind_is_named(tmp_path, forgets, role, boundary):
    Program(forgets).train(str(tmp_path / "run"))

    report = check_run(open_trace(tmp_path / "run"), Selection())

    found = [(one.invariant, one.step, one.role, one.boundary) for one in report.broken]
    assert found[:1] == ([("saved-is-loaded", 2, role, boundary)] if forgets else [])
    assert report.checked["saved-is-loaded"] > 20


def test_a_resumed_program_says_what_was_loaded_before_its_guard(tmp_path):
    program = Program()
    program.args.iteration = 7
    config = {"output_dir": str(tmp_path / "run")}
    with upguard_plugin.enable(program.model, program.optimizer, config) as guard:
        CheckpointProbe(guard, program.training).resumed()
        program.step(guard)

    batch = open_trace(tmp_path / "run").read(0, 0)
    keys = [batch.key_of(row) for row in range(len(batch))]
    loaded = [key for key in keys if key.phase == "checkpoint"]
    assert keys[: len(loaded)] == loaded
    assert {key.operator for key in loaded} == {"load"}
    assert {"weight", "bias", "rng.torch_cpu"} <= {key.boundary for key in loaded}
