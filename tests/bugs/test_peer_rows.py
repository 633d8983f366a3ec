"""One bit flipped below the hooks, or one draw, or one token: each is named where it happened.

These are the situations in which other tools blame an innocent operator, or see nothing at all.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.bugs.faults import FlippedOperator, flip_bit
from tests.bugs.training import compare, found, record

PLACE = ("step", "phase", "boundary", "kind")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return record(tmp_path_factory.mktemp("clean") / "clean")


def test_two_identical_runs_are_identical(clean, tmp_path):
    assert compare(clean, record(tmp_path / "again"))["verdict"] == "identical"


# (operator, which of its calls, the right answer): a step has 17 addmm, 34 mm and 9 layer norms.
FLIPS = [
    ("aten.addmm.", 17 + 2 * 4 + 2, (1, "forward", "blocks.2.mlp.fc1", "forward")),
    ("aten.native_layer_norm.", 9 + 3, (1, "forward", "blocks.1.ln2", "forward")),
    ("aten.mm.", 34 + 0, (1, "backward", "head", "backward")),
    ("aten.native_layer_norm_backward.", 9 + 2, (1, "backward", "blocks.3.ln1", "backward")),
]


@pytest.mark.parametrize(("operator", "nth", "place"), FLIPS)
def test_a_flipped_bit_is_blamed_on_its_module_and_phase(clean, tmp_path, operator, nth, place):
    mode = partial(FlippedOperator, operator, nth, acts=True)
    verdict = compare(clean, record(tmp_path / "flipped", mode=mode))
    assert found(verdict, *PLACE) == place


def test_a_weight_that_changes_after_the_step_is_named(clean, tmp_path):
    def flip(model, optimizer, step):
        if step == 1:
            flip_bit(model.blocks[2].mlp.fc1.weight)

    verdict = compare(clean, record(tmp_path / "weight", after_update=flip))
    assert found(verdict, *PLACE, "role") == (
        2, "start", "blocks.2.mlp.fc1.weight", "optimizer", "param",
    )  # fmt: skip


def test_a_flipped_bit_of_the_optimizer_state_is_named(clean, tmp_path):
    def flip(model, optimizer, step):
        if step == 1:
            flip_bit(optimizer.state[model.blocks[1].attn.proj.weight]["exp_avg"])

    verdict = compare(clean, record(tmp_path / "moment", after_update=flip))
    assert found(verdict, *PLACE, "role", "slot") == (
        2, "start", "blocks.1.attn.proj.weight", "optimizer", "optimizer_state", "exp_avg",
    )  # fmt: skip


def test_one_changed_token_is_the_data(clean, tmp_path):
    def change(step, tokens):
        if step == 1:
            tokens[2, 5] = (tokens[2, 5] + 1) % 1024
        return tokens

    verdict = compare(clean, record(tmp_path / "token", tokens_of=change))
    assert found(verdict, "step", "phase", "kind") == (1, "data", "data")


def test_one_extra_draw_is_the_rng(tmp_path):
    def draw(model, optimizer, step):
        if step == 1:
            torch.rand(1)

    baseline = record(tmp_path / "dropout", dropout=0.1)
    verdict = compare(baseline, record(tmp_path / "draw", dropout=0.1, before_step=draw))
    assert found(verdict, *PLACE) == (1, "start", "rng.torch_cpu", "rng")
