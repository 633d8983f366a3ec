"""Checkpoints of a loop on one process: what is saved is loaded, and faults between are named."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import upguard_plugin
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace


def check(run: Path):
    return check_run(open_trace(run), Selection())


def build(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def step(guard, model, optimizer, schedule, dtype=torch.float32) -> None:
    model(torch.randn(3, 4, dtype=dtype)).square().mean().backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    guard.step()


def all_of(model, optimizer, schedule, position: int) -> dict:
    """A checkpoint as a loop writes it."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "loader": {"epoch": 1, "position": position},
    }


def restore(found: dict, model, optimizer, schedule) -> None:
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["schedule"])
    torch.set_rng_state(found["rng"])


def trained(run: Path, file: Path, *, level="module", spoil=None, restoring=restore) -> list:
    """Two steps, a save, a step, the load of it, a step; the weights at the end.

    spoil: called with what the file holds, while it lies on the disk.
    """
    training = build()
    config = {"output_dir": str(run), "level": level}
    with upguard_plugin.enable(*training[:2], config) as guard:
        for _ in range(2):
            step(guard, *training)
        torch.save(all_of(*training, position=2), file)
        step(guard, *training)
        if spoil is not None:
            rewrite(file, spoil)
        restoring(torch.load(file), *training)
        step(guard, *training)
    return [p.detach().clone() for p in training[0].parameters()]


def rewrite(file: Path, spoil) -> None:
    """As a disk changes a file: by nothing that is recorded."""
    found = torch.serialization.load.__wrapped__(file)
    spoil(found)
    torch.serialization.save.__wrapped__(found, file)


@pytest.mark.parametrize("level", ["stage", "module", "op"])
def test_a_clean_save_and_load_hold(tmp_path, level):
    trained(tmp_path / "run", tmp_path / "last.pt", level=level)

    report = check(tmp_path / "run")

    assert [one.explanation for one in report.broken] == []
    assert report.checked["saved-is-loaded"] > 40
    assert "saved-is-loaded" not in report.not_applied


def flip(found: dict) -> None:
    found["model"]["0.weight"].view(torch.int32)[0, 0] ^= 1


def rewind(found: dict) -> None:
    found["loader"]["position"] = 0


def reseed(found: dict) -> None:
    found["rng"][16] ^= 1


def round_moments(found: dict) -> None:
    state = found["optimizer"]["state"][0]
    state["exp_avg"] = state["exp_avg"].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "slot", "why"),
    [
        (flip, "model.0.weight", "model.0.weight in the checkpoint is not what was saved."),
        (rewind, "loader.position", "loader.position in the checkpoint is not what was saved."),
        (reseed, "rng", "Rng in the checkpoint is not what was saved."),
        (
            round_moments,
            "optimizer.state.0.exp_avg",
            "optimizer.state.0.exp_avg in the checkpoint is not what was saved. It was saved as "
            "float32 and is bfloat16.",
        ),
    ],
)
def test_a_file_that_changed_is_named(tmp_path, spoil, slot, why):
    trained(tmp_path / "run", tmp_path / "last.pt", spoil=spoil)

    first = check(tmp_path / "run").broken[0]

    assert (first.invariant, first.step, first.phase) == ("saved-is-loaded", 3, "checkpoint")
    assert (first.boundary, first.slot, first.explanation) == ("checkpoint", slot, why)


class MasterSgd(torch.optim.Optimizer):
    """Keeps float32 masters of its bfloat16 weights in its state."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            master = state.setdefault("master", p.float())
            master -= self.param_groups[0]["lr"] * p.grad
            p.copy_(master)


class CarefulSgd(MasterSgd):
    """The clean twin: puts the masters back as they were."""

    def load_state_dict(self, state_dict) -> None:
        super().load_state_dict(state_dict)
        for p, number in zip(self.param_groups[0]["params"], state_dict["state"], strict=True):
            self.state[p]["master"] = state_dict["state"][number]["master"].clone()


@pytest.mark.parametrize("kind", [MasterSgd, CarefulSgd])
def test_masters_that_a_load_rounds_are_named(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False).bfloat16()
    optimizer = kind(model.parameters())
    with upguard_plugin.enable(model, optimizer, {"output_dir": str(tmp_path / "run")}) as guard:
        for _ in range(2):
            model(torch.ones(1, 4).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model(torch.ones(1, 4).bfloat16()).sum().backward()
        guard.step()

    report = check(tmp_path / "run")

    assert report.checked["saved-is-loaded"] > 0
    found = [(one.step, one.boundary, one.role, one.slot) for one in report.broken]
    if kind is CarefulSgd:
        assert found == []
        return
    assert found == [(2, "weight", "optimizer_state", "master")]
    assert report.broken[0].explanation == (
        "optimizer_state master of weight is not what the state dict gave it. It was given as "
        "float32 and is kept as bfloat16."
    )


def test_weights_of_another_model_or_precision_may_be_loaded(tmp_path):
    """An average is saved beside the weights, in float32, and loaded in their place."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).bfloat16()
    average = {name: tensor.float() + 1 for name, tensor in model.state_dict().items()}
    file = tmp_path / "both.pt"
    with upguard_plugin.enable(model, None, {"output_dir": str(tmp_path / "run")}) as guard:
        guard.begin_step_if_needed()
        torch.save({"model": model.state_dict(), "average": average}, file)
        guard.step()
        guard.begin_step_if_needed()
        model.load_state_dict(torch.load(file)["average"])
        guard.step()

    report = check(tmp_path / "run")

    assert report.broken == [] and report.checked["saved-is-loaded"] > 0


def test_what_is_no_checkpoint_is_let_alone(tmp_path):
    model = nn.Linear(4, 2)
    with upguard_plugin.enable(model, None, {"output_dir": str(tmp_path / "run")}) as guard:
        guard.begin_step_if_needed()
        torch.save({"images": torch.ones(3), "names": ["a"]}, tmp_path / "batch.pt")
        torch.load(tmp_path / "batch.pt")
        guard.step()

    batch = open_trace(tmp_path / "run").read(0, 0)
    assert "checkpoint" not in {batch.key_of(row).phase for row in range(len(batch))}


def test_odd_values_of_a_checkpoint_do_not_end_the_recording(tmp_path):
    model, *_ = built = build()
    holder: dict[str, object] = {"model": model.state_dict(), "count": 10**5000}
    holder["counts"] = [10**5000, 1]
    holder["self"] = holder
    holder["list"] = [holder, model.state_dict()]
    with upguard_plugin.enable(model, built[1], {"output_dir": str(tmp_path / "run")}) as guard:
        torch.save(holder, tmp_path / "file")
        step(guard, *built)

    batch = open_trace(tmp_path / "run").read(0, 0)
    slots = [batch.key_of(i).slot for i in range(len(batch))]
    assert any(slot.endswith("count") for slot in slots)
    assert not any("self" in slot for slot in slots)


def test_a_closed_guard_leaves_nothing_behind(tmp_path):
    before = torch.save, torch.load, nn.Module.load_state_dict
    model, optimizer, _ = build()
    guard = upguard_plugin.enable(model, optimizer, {"output_dir": str(tmp_path / "run")})
    assert torch.save is not before[0]
    guard.close()

    assert (torch.save, torch.load, nn.Module.load_state_dict) == before
    assert "load_state_dict" not in vars(optimizer)


def test_recording_changes_no_weight(tmp_path):
    recorded = trained(tmp_path / "run", tmp_path / "a.pt")
    training = build()
    for _ in range(2):
        step(upguard_plugin.enable(*training[:2], {"enabled": False}), *training)
    torch.save(all_of(*training, position=2), tmp_path / "b.pt")
    step(upguard_plugin.enable(*training[:2], {"enabled": False}), *training)
    restore(torch.load(tmp_path / "b.pt"), *training)
    step(upguard_plugin.enable(*training[:2], {"enabled": False}), *training)

    assert all(map(torch.equal, recorded, training[0].parameters()))


def resumed(run: Path, file: Path, spoil=None) -> None:
    """Goes on from a file of an earlier run, and says which of its steps comes next."""
    training = build()
    with upguard_plugin.enable(*training[:2], {"output_dir": str(run)}) as guard:
        found = torch.load(file)
        if spoil is not None:
            spoil(found)
        restore(found, *training)
        step(guard, *training)


@pytest.mark.parametrize("spoil", [None, flip])
def test_a_resumed_run_is_compared_with_the_state_that_was_saved(tmp_path, spoil):
    training = build()
    config = {"output_dir": str(tmp_path / "baseline")}
    with upguard_plugin.enable(*training[:2], config) as guard:
        step(guard, *training)
        torch.save(all_of(*training, position=1), tmp_path / "last.pt")
        step(guard, *training)
    resumed(tmp_path / "target", tmp_path / "last.pt", spoil)

    verdict = compare_runs(open_trace(tmp_path / "baseline"), open_trace(tmp_path / "target"))

    first = verdict.first_divergence
    if spoil is None:
        assert (verdict.verdict, first) == ("identical", None), verdict.notes
    else:
        assert (first.step, first.role, first.boundary) == (1, "param", "0.weight")


def test_saving_is_no_part_of_what_is_compared(tmp_path):
    for name, saves in (("baseline", True), ("target", False)):
        training = build()
        with upguard_plugin.enable(*training[:2], {"output_dir": str(tmp_path / name)}) as guard:
            step(guard, *training)
            if saves:
                torch.save({"run": name, **all_of(*training, position=2)}, tmp_path / "x.pt")
            step(guard, *training)

    runs = [open_trace(tmp_path / name) for name in ("baseline", "target")]
    assert compare_runs(*runs, same_program=True).verdict == "identical"
