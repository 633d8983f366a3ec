"""Wrong types are refused in a sentence, at `enable` and in the first step, and never later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recorded import Recorded, guarded
from torch import nn

from upguard_plugin.capture.enable import enable
from upguard_plugin.errors import ConfigError

ONE = torch.ones(1)
WRONG_CALLS = {
    "microbatch: k is of type str, not a whole number": ("microbatch", "a"),
    "microbatch: k is of type float, not a whole number": ("microbatch", 1.5),
    "microbatch: k is -5; micro-batches count from 0": ("microbatch", -5),
    "scalar: the name is of type int, not text": ("scalar", 5, 1.0),
    "scalar('loss', ...): the value is of type str, not a number": ("scalar", "loss", "1"),
    "scalar('loss', ...): the value is of type NoneType, not a number": ("scalar", "loss", None),
    "scalar('loss', ...): the value is of type complex, not a number": ("scalar", "loss", 1j),
    "data: the name is of type int, not text": ("data", 3, ONE),
    "data('x', ...): batch_dim is of type str, not a whole number": ("data", "x", ONE, "b"),
    "observe: the boundary is of type NoneType, not text": ("observe", None, ONE),
    "observe('x', ...): the tensor is of type ndarray, not a torch.Tensor": (
        "observe", "x", np.ones(1),
    ),
    "observe('x', ...): slot is of type int, not text": ("observe", "x", ONE, {"slot": 1}),
    "observe('x', ...): placement is of type int, not a placement or its text": (
        "observe", "x", ONE, {"placement": 5},
    ),
    "step: iteration is of type str, not a whole number": ("step", {"iteration": "a"}),
    "step: mark is of type int, not text": ("step", {"mark": 5}),
}  # fmt: skip
WRONG_SETUPS = {
    "the optimizer is of type str, which has neither param_groups nor step": {"optimizer": "adam"},
    "layout is of type str, not a dict of axes": {"layout": "tp"},
    "axis 'dp' of layout is of type str, not a ProcessGroup or a size": {"layout": {"dp": "4"}},
    "placements is of type str, not a dict of boundaries and specs": {"placements": "o i"},
    "tied is of type int, not a list of lists of names": {"tied": 5},
    "an entry of tied is of type str, not a list of names": {"tied": ["weight"]},
}


def call(guard, method: str, *arguments) -> None:
    named = arguments[-1] if isinstance(arguments[-1], dict) else {}
    getattr(guard, method)(*arguments[: len(arguments) - bool(named)], **named)


@pytest.mark.parametrize("sentence", WRONG_CALLS)
def test_a_wrong_call_is_refused_in_the_first_step(tmp_path, sentence):
    with guarded(tmp_path / "run", nn.Linear(1, 1)) as guard:
        with pytest.raises(ConfigError) as caught:
            call(guard, *WRONG_CALLS[sentence])
        assert str(caught.value) == f"cannot call guard.{sentence}"


@pytest.mark.parametrize("sentence", WRONG_CALLS)
def test_later_it_ends_the_recording_and_not_the_training(tmp_path, sentence):
    with guarded(tmp_path / "run", nn.Linear(1, 1)) as guard:
        guard.step()
        call(guard, *WRONG_CALLS[sentence])

    end = Recorded(tmp_path / "run").end
    assert not end.complete
    assert sentence in end.reason


def test_numbers_of_numpy_are_taken_everywhere(tmp_path):
    with guarded(tmp_path / "run", nn.Linear(1, 1)) as guard:
        guard.microbatch(np.int64(1))
        guard.scalar("loss", np.float32(0.5))
        guard.scalar("loss", True)
        guard.step(iteration=np.int32(7), mark="skipped")

    run = Recorded(tmp_path / "run")
    assert run.end.complete
    assert [e.microbatch for e in run.find(boundary="loss")] == [1, 1]


@pytest.mark.parametrize("sentence", WRONG_SETUPS)
def test_a_wrong_setup_is_refused_before_anything_is_recorded(tmp_path, sentence):
    given = {"optimizer": None, **WRONG_SETUPS[sentence]}

    with pytest.raises(ConfigError) as caught:
        enable(
            nn.Linear(1, 1), given.pop("optimizer"), {"output_dir": str(tmp_path / "r")}, **given
        )

    assert str(caught.value) == f"cannot call enable: {sentence}"
    assert not (tmp_path / "r").exists()
