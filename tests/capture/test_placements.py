"""Layouts and placements as a user gives them."""

from __future__ import annotations

import pytest
import torch

from upguard_plugin.capture.placements import Placements, layout_of
from upguard_plugin.errors import ConfigError, PlacementError
from upguard_plugin.records import Axis, Layout

TP2 = Layout((Axis("tp", 2, 1, (0, 1)),))
SHAPE = torch.Size((4, 8))


def test_without_rules_nothing_is_known():
    assert Placements(None, TP2).of("fc1.weight", "param", "value", SHAPE) is None


def test_an_exact_name_wins_over_a_glob_and_a_glob_over_none():
    rules = Placements({"*.fc1.weight": "o[tp] i", "a.fc1.weight": "o i[tp]"}, TP2)
    assert rules.of("a.fc1.weight", "param", "value", SHAPE).logical_shape == (4, 16)
    assert rules.of("b.fc1.weight", "param", "value", SHAPE).logical_shape == (8, 8)
    assert rules.of("b.fc2.weight", "param", "value", SHAPE) is None


def test_a_rule_by_role_holds_for_that_role_only():
    rules = Placements({"fc1": {"output": "b o[tp]"}}, TP2)
    assert rules.of("fc1", "output", "0", SHAPE).sharded == ("tp",)
    assert rules.of("fc1", "input", "args.0", SHAPE) is None
    assert rules.of("fc1", "grad_output", "0", SHAPE) is None


def test_a_rule_by_slot_holds_for_that_slot_only():
    rules = Placements({"attn": {"output": {"out.0": "b o[tp]"}}}, TP2)
    assert rules.of("attn", "output", "out.0", SHAPE) is not None
    assert rules.of("attn", "output", "out.1", SHAPE) is None


def test_a_plain_rule_says_nothing_of_gradients_of_activations():
    rules = Placements({"fc1": "b o"}, TP2)
    assert rules.of("fc1", "output", "0", SHAPE).sharded == ()
    assert rules.of("fc1", "grad_output", "0", SHAPE) is None


def test_a_scalar_state_of_a_sharded_parameter_is_not_sharded():
    rules = Placements({"fc1.weight": "o[tp] i"}, TP2)
    assert rules.of("fc1.weight", "optimizer_state", "step", torch.Size(())) is None


def test_an_axis_called_dp_means_replicas_of_states_and_says_nothing_of_activations():
    rules = Placements(None, Layout((Axis("dp", 2, 0, (0, 1)),)))
    assert rules.of("fc1.weight", "param", "value", SHAPE).logical_shape == (4, 8)
    assert rules.of("fc1", "output", "0", SHAPE) is None


def test_a_spec_that_does_not_fit_names_the_boundary_the_spec_and_the_shape():
    rules = Placements({"fc1.weight": "o[tp] i k"}, TP2)
    with pytest.raises(PlacementError) as caught:
        rules.of("fc1.weight", "param", "value", SHAPE)
    message = str(caught.value)
    assert "the placement of fc1.weight does not fit" in message
    assert "o[tp] i k" in message and "[4, 8]" in message


@pytest.mark.parametrize(
    "rules, error",
    [
        ({"fc1": "o[tp"}, PlacementError),
        ({"fc1": {"outputs": "b o"}}, ConfigError),
        ({"fc1": 3}, ConfigError),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_at_once(rules, error):
    with pytest.raises(error):
        Placements(rules, TP2)


def test_a_size_spans_the_world_or_is_one():
    layout = layout_of({"dp": 4, "tp": 1}, rank=2, world_size=4)
    assert layout.axis("dp") == Axis("dp", 4, 2, (0, 1, 2, 3))
    assert layout.axis("tp") == Axis("tp", 1, 0, (2,))


def test_a_size_that_does_not_span_the_world_is_refused():
    with pytest.raises(ConfigError) as caught:
        layout_of({"tp": 2}, rank=0, world_size=4)
    assert str(caught.value) == (
        "cannot tell which ranks form axis 'tp': its size is 2, the world's is 4\n"
        "  try  give the torch ProcessGroup of this rank instead of a size"
    )
