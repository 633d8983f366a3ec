"""Settings that name nothing are said once, to the user and in the trace; others never."""

from __future__ import annotations

import pytest
import torch
from recorded import Recorded, guarded
from torch import nn

from upguard_plugin.capture.enable import IdleGuard, enable
from upguard_plugin.records import NEVER_FIRED, Axis, Layout


def told(tmp_path, capsys, settings, num_steps=2):
    """What a run of some steps says of its settings: the notes and the lines on stderr agree."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with guarded(tmp_path / "run", model, **settings) as guard:
        for _ in range(num_steps):
            model(torch.ones(1, 2)).sum().backward()
            guard.step()
    notes = [n for n in Recorded(tmp_path / "run").end.notes if n.startswith(NEVER_FIRED)]
    lines = [x for x in capsys.readouterr().err.splitlines() if "the setting " in x]
    assert lines == [f"upguard: {note.removeprefix(NEVER_FIRED)}" for note in notes]
    return [note.removeprefix(f"{NEVER_FIRED}the setting ") for note in notes]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"modules": "0,relu*"}, ["modules has 'relu*', and no module is called like that"]),
        ({"modules": "!drop"}, ["modules has '!drop', and no module is called like that"]),
        ({"modules": "1,!0"}, []),
        ({"modules": "0.weight,(outside)", "level": "op"}, []),
        ({"modules": "nothing", "level": "stage"}, []),
        (
            {"dump": {"boundary": "blocks.*"}},
            [
                "dump has 'blocks.*', and no boundary that was recorded in its steps is called "
                "like that"
            ],
        ),
        (
            {"dump": {"boundary": "0", "steps": "2-"}},
            ["dump asks for steps 2-; none of them was recorded"],
        ),
        ({"dump": {"boundary": "0", "steps": "1"}}, []),
        ({"steps": "2-4"}, ["steps is '2-4', and the run had 2 steps: nothing was recorded"]),
        ({"steps": "1-4"}, []),
        ({"interval": 100}, []),
    ],
)
def test_what_names_nothing_is_said_and_nothing_else(tmp_path, capsys, settings, expected):
    assert told(tmp_path, capsys, settings) == expected


def test_a_run_that_ends_before_its_first_step_blames_no_setting(tmp_path, capsys):
    assert told(tmp_path, capsys, {"steps": "5"}, num_steps=0) == []


def test_ranks_that_are_not_there_are_said_and_leave_the_training_alone(tmp_path, capsys):
    settings = {"output_dir": str(tmp_path / "run"), "ranks": "8-"}

    assert isinstance(enable(nn.Linear(1, 1), None, settings), IdleGuard)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == (
        "upguard: the setting ranks is '8-', and the run has 1 rank: nothing is recorded\n"
    )


def test_a_pipeline_stage_notes_what_another_stage_may_have(tmp_path, capsys):
    stages = Layout((Axis("pp", 2, 0, (0, 1)),))
    with guarded(tmp_path / "run", nn.Linear(1, 1), modules="head", layout=stages):
        pass

    assert any(note.startswith(NEVER_FIRED) for note in Recorded(tmp_path / "run").end.notes)
    assert "the setting" not in capsys.readouterr().err
