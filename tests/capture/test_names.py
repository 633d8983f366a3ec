"""Names of modules, parameters and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from upguard_plugin.capture.names import ParameterNames, clean_name
from upguard_plugin.errors import ConfigError


class DistributedDataParallel(nn.Module):
    """Stands in for a wrapper of that name: what counts is its class name and its `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


EXPECTED = ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameters_and_buffers_have_their_bare_names():
    names = ParameterNames((("", model()),))
    assert list(names.parameters) == EXPECTED
    assert list(names.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(names.modules) == ["(root)", "0", "1"]


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda m: torch.compile(m, backend="eager"),
        checkpoint_wrapper,
        lambda m: DistributedDataParallel(torch.compile(m, backend="eager")),
    ],
)
def test_wrappers_leave_no_part_in_the_names(wrap):
    inner = model()
    names = ParameterNames((("", wrap(inner)),))
    assert list(names.parameters) == EXPECTED
    assert names.of(inner) == "(root)"
    assert names.of(inner[0].weight) == "0.weight"


def test_a_module_of_ones_own_called_module_keeps_its_name():
    outer = nn.Module()
    outer.module = nn.Linear(2, 2)
    assert list(ParameterNames((("", outer),)).parameters) == ["module.weight", "module.bias"]


def test_several_models_are_told_apart_by_a_prefix():
    names = ParameterNames((("model0.", nn.Linear(2, 2)), ("model1.", nn.Linear(2, 2))))
    assert list(names.parameters) == [
        "model0.weight",
        "model0.bias",
        "model1.weight",
        "model1.bias",
    ]
    assert list(names.modules) == ["model0", "model1"]


def test_a_tied_parameter_has_one_name_and_an_alias():
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    names = ParameterNames((("", tied),))
    assert list(names.parameters) == ["0.weight"]
    assert names.aliases == {"0.weight": ("1.weight",)}
    assert names.of(tied[1].weight) == "0.weight"


def test_the_first_name_of_a_tied_list_is_the_canonical_one():
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    names = ParameterNames((("", tied),), tied=[["1.weight", "0.weight"]])
    assert list(names.parameters) == ["1.weight"]
    assert names.aliases == {"1.weight": ("0.weight",)}


def test_a_tied_list_with_a_wrong_name_is_refused():
    with pytest.raises(ConfigError) as caught:
        ParameterNames((("", model()),), tied=[["0.weight", "head.weight"]])
    assert str(caught.value).startswith("tied names a parameter that no model has: 'head.weight'")


def test_a_shared_module_has_the_first_name_and_its_parameters_an_alias():
    shared = nn.Linear(2, 2, bias=False)
    names = ParameterNames((("", nn.Sequential(shared, shared)),))
    assert names.of(shared) == "0"
    assert names.aliases == {"0.weight": ("1.weight",)}


def test_replaced_parameters_are_found_after_a_refresh():
    linear = nn.Linear(2, 2, bias=False)
    names = ParameterNames((("", linear),))
    table = names.parameters
    linear.weight = nn.Parameter(torch.zeros(2, 2))
    assert names.of(linear.weight) is None
    names.refresh()
    assert names.of(linear.weight) == "weight"
    assert table["weight"] is linear.weight


def test_composed_names_are_cleaned():
    assert clean_name("module.blocks.0._checkpoint_wrapped_module.fc1") == "blocks.0.fc1"
