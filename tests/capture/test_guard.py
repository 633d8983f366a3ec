"""The guard: switching on and off, steps, scalars, observe, and our own failures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from recorded import Recorded, guarded, record_steps
from torch import nn

import upguard_plugin
from upguard_plugin.capture.enable import IdleGuard, enable
from upguard_plugin.capture.run import find_rank, run_token
from upguard_plugin.errors import ConfigError, PlacementError, RunDirectoryError
from upguard_plugin.fingerprint.queue import FingerprintQueue


def tiny():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer, guard=None, steps=3):
    for k in range(steps):
        model(torch.full((2, 3), k + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if guard is not None:
            guard.step()


def hooks_of(model, optimizer):
    """Every place where a probe could have left something."""
    parts = list(model.modules())
    attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
                  "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
                  "_forward_pre_hooks_with_kwargs", "_state_dict_hooks")  # fmt: skip
    found = [{name: dict(getattr(part, name)) for name in attributes} for part in parts]
    found += [
        {name: value for name, value in vars(part).items() if callable(value)} for part in parts
    ]
    for p in model.parameters():
        found.append({"tensor": dict(p._backward_hooks or {}), "attributes": dict(vars(p))})
        found.append({"accumulate": dict(p._post_accumulate_grad_hooks or {})})
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    found += [{name: dict(getattr(optimizer, name)) for name in names}]
    found += [{name: value for name, value in vars(optimizer).items() if callable(value)}]
    found += [dict(vars(torch.nn.utils)), {"step": type(optimizer).step}]
    return found


def threads():
    import threading

    return [t.name for t in threading.enumerate() if "upguard" in t.name]


def test_closing_leaves_no_hook_no_attribute_and_no_thread(tmp_path):
    model, optimizer = tiny()
    train(model, optimizer)
    before = hooks_of(model, optimizer)

    with guarded(tmp_path / "run", model, optimizer) as guard:
        train(model, optimizer, guard)
        assert hooks_of(model, optimizer) != before
        assert threads() == ["upguard-writer"]

    assert hooks_of(model, optimizer) == before
    assert threads() == []


def test_off_installs_nothing_and_writes_nothing(tmp_path, monkeypatch):
    model, optimizer = tiny()
    before = hooks_of(model, optimizer)
    monkeypatch.setenv("UPGUARD", "0")

    guard = enable(model, optimizer, {"output_dir": str(tmp_path / "run")})

    assert isinstance(guard, IdleGuard)
    assert not guard.active
    assert hooks_of(model, optimizer) == before
    with guard:
        guard.microbatch(0)
        guard.data("x", torch.ones(1))
        guard.scalar("loss", 1.0)
        guard.observe("x", torch.ones(1))
        train(model, optimizer, guard)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_is_not_selected_installs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, optimizer = tiny()
    guard = enable(model, optimizer, {"output_dir": str(tmp_path / "run"), "ranks": "0"})
    assert isinstance(guard, IdleGuard)
    assert not (tmp_path / "run").exists()


def test_only_selected_steps_are_recorded(tmp_path):
    model, optimizer = tiny()
    with guarded(tmp_path / "run", model, optimizer, steps="1,3-", interval=1) as guard:
        train(model, optimizer, guard, steps=5)
    run = Recorded(tmp_path / "run")
    assert run.steps == [1, 3, 4]
    assert run.find(step=1, role="param", phase="start")


def test_a_step_that_was_not_finished_is_not_in_the_trace(tmp_path):
    model, optimizer = tiny()
    with guarded(tmp_path / "run", model, optimizer) as guard:
        train(model, optimizer, guard, steps=2)
        model(torch.ones(2, 3))
    run = Recorded(tmp_path / "run")
    assert run.steps == [0, 1]
    assert run.end.complete


def test_the_state_at_start_comes_before_the_first_forward(tmp_path):
    model, optimizer = tiny()
    with guarded(tmp_path / "run", model, optimizer) as guard:
        train(model, optimizer, guard, steps=1)
    phases = [e.phase for e in Recorded(tmp_path / "run").events]
    assert phases[0] == "start"
    assert phases.index("forward") > max(i for i, p in enumerate(phases) if p == "start")


def test_scalars_are_kept_with_their_call(tmp_path):
    model, optimizer = tiny()
    with guarded(tmp_path / "run", model, optimizer) as guard:
        guard.scalar("loss", torch.tensor(0.5))
        guard.scalar("loss", 2.0)
        guard.scalar("tokens", 7)
        guard.step()
    found = Recorded(tmp_path / "run").find(role="scalar", phase="loss")
    scalars = [(e.boundary, e.call, e.dtype) for e in found if "optimizer" not in e.boundary]
    assert scalars == [("loss", 0, "float32"), ("loss", 1, "float64"), ("tokens", 0, "int64")]


def test_observe_records_at_a_boundary_of_ones_own(tmp_path):
    model, _ = tiny()
    with guarded(tmp_path / "run", model) as guard:
        for _ in range(2):
            guard.observe("router", torch.ones(4), role="output", phase="forward")
        guard.step()
    events = Recorded(tmp_path / "run").find(boundary="router")
    assert [(e.phase, e.role, e.call, e.shape) for e in events] == [
        ("forward", "output", 0, (4,)),
        ("forward", "output", 1, (4,)),
    ]


def test_observe_refuses_a_role_that_does_not_exist(tmp_path):
    model, _ = tiny()
    with guarded(tmp_path / "run", model) as guard, pytest.raises(ConfigError) as caught:
        guard.observe("router", torch.ones(4), role="outputs")
    assert "unknown role 'outputs'" in str(caught.value)


def test_a_failure_of_ours_stops_the_recording_and_not_the_training(tmp_path, monkeypatch):
    model, optimizer = tiny()
    expected, expected_optimizer = tiny()
    train(expected, expected_optimizer)
    real = FingerprintQueue.put

    def failing(self, tensor, placement=None, **measures):
        if guard.position.step == 1:
            raise RuntimeError("kernel went away")
        return real(self, tensor, placement, **measures)

    monkeypatch.setattr(FingerprintQueue, "put", failing)
    with guarded(tmp_path / "run", model, optimizer) as guard:
        train(model, optimizer, guard)

    run = Recorded(tmp_path / "run")
    assert run.steps == [0]
    assert not run.end.complete
    assert run.end.reason.startswith("capture failed: RuntimeError: kernel went away")
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_placement_that_does_not_fit_stops_the_job_at_step_0(tmp_path):
    model, optimizer = tiny()
    rules = {"0": {"input": "b s h"}}
    with (
        pytest.raises(PlacementError) as caught,
        guarded(tmp_path / "run", model, optimizer, placements=rules) as guard,
    ):
        train(model, optimizer, guard)
    assert "the placement of 0 does not fit" in str(caught.value)
    assert "b s h" in str(caught.value)


def test_a_crash_of_the_training_is_said_in_the_trace(tmp_path):
    model, optimizer = tiny()
    with pytest.raises(ZeroDivisionError), guarded(tmp_path / "run", model, optimizer) as guard:
        train(model, optimizer, guard, steps=1)
        1 / 0  # noqa: B018
    run = Recorded(tmp_path / "run")
    assert run.steps == [0]
    assert run.end.reason == "the training ended with ZeroDivisionError"


SCRIPT = """
import sys, torch, upguard_plugin
model = torch.nn.Linear(2, 2)
guard = upguard_plugin.enable(model, None, {"output_dir": sys.argv[1], "level": sys.argv[3]})
model(torch.ones(1, 2)).sum().backward()
guard.step()
if sys.argv[2] == "crash":
    raise ValueError("bad")
"""


@pytest.mark.parametrize(
    "how, complete, reason",
    [("end", True, ""), ("crash", False, "the training ended with ValueError")],
)
@pytest.mark.parametrize("level", ["module", "op"])
def test_a_script_that_never_closes_has_a_whole_trace(tmp_path, level, how, complete, reason):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), how, level]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    end = Recorded(tmp_path / "run").end
    assert (end.complete, end.reason) == (complete, reason)
    run = tmp_path / "run"
    lines = [line for line in process.stderr.splitlines() if line.startswith("upguard: ")]
    assert lines[0] == (
        f"upguard: recording level {level} to {run}; afterwards: upguard compare {run} OTHER_RUN"
    )
    assert len(lines) == 2 and lines[1].endswith(" MB per step and rank")
    assert "Exception ignored" not in process.stderr  # of what goes while Python ends


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    model, optimizer = tiny()
    with guarded(tmp_path / "run", model, optimizer) as guard:
        train(model, optimizer, guard)
    with pytest.raises(RunDirectoryError):
        enable(model, optimizer, {"output_dir": str(tmp_path / "run")})
    with guarded(tmp_path / "run", model, optimizer, overwrite=True) as guard:
        train(model, optimizer, guard, steps=1)
    assert Recorded(tmp_path / "run").steps == [0]


def test_what_is_no_module_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        upguard_plugin.enable("gpt", None, {"output_dir": str(tmp_path / "run")})
    assert str(caught.value) == "cannot record a str: enable() takes an nn.Module or a list"


def test_a_lazy_module_is_refused_until_it_has_its_parameters(tmp_path):
    with pytest.raises(ConfigError) as caught:
        upguard_plugin.enable(nn.LazyLinear(2), None, {"output_dir": str(tmp_path / "run")})
    assert str(caught.value) == (
        "cannot record a LazyLinear: it has parameters without a shape\n"
        "  try  run one forward before enable()"
    )


def test_the_manifest_says_what_was_run(tmp_path):
    model, _ = tiny()
    run = record_steps(tmp_path / "run", model, lambda guard: None, program="variant a")
    assert run.manifest.level == "module"
    assert run.manifest.program == "variant a"
    assert run.manifest.versions["torch"] == torch.__version__
    assert len(run.manifest.program_digest) == 32


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "PMI_RANK": "1"}, (3, 8)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (5, 6)),
        ({"RANK": "2"}, (2, 3)),
    ],
)
def test_the_rank_comes_from_the_launcher(environ, expected):
    assert find_rank(environ) == expected


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "job7"}, "job7"),
        ({"UPGUARD_RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "job7"}, "mine"),
        ({"SLURM_JOB_ID": "12"}, None),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "12.0"),
    ],
)
def test_the_run_token_is_the_launchers(environ, expected):
    assert run_token(environ) == expected
