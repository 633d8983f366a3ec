"""Slices of flat tensors in a loop of one's own: what is recorded of them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import upguard_plugin
from upguard_plugin.errors import ConfigError, PlacementError
from upguard_plugin.records import Axis, Layout
from upguard_plugin.trace.reader import open_trace

OF_TWO = Layout((Axis("dp", 2, 1, (0, 1)),))  # the second of two ranks
ELEMENTS = {"weight": (6, 12), "bias": (0, 3)}


def make(has_master: bool = False, padding: int = 0):
    """A model whose flat tensor an optimizer keeps the second half of."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    flat = torch.cat([model.weight.detach().flatten(), model.bias.detach(), torch.zeros(padding)])
    model.weight.data, model.bias.data = flat[:12].view(3, 4), flat[12:15]
    own = nn.Parameter(flat[6:].clone() if has_master else flat[6:])
    return model, own, torch.optim.SGD([own], lr=0.1, momentum=0.5)


def gradient_of(model, size):
    whole = torch.cat([model.weight.grad.flatten(), model.bias.grad])[6:]
    return torch.cat([whole, torch.zeros(size - len(whole))])


def train(folder, elements=ELEMENTS, **how):
    model, own, optimizer = make(**how)
    config = {"output_dir": str(folder)}
    with upguard_plugin.enable(model, optimizer, config, layout=OF_TWO) as guard:
        guard.slices(own, elements)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            own.grad = gradient_of(model, len(own))
            optimizer.step()
            guard.step()
    return own


def recorded(folder):
    """The keys of the weight's events in step 1, gradients as the optimizer uses them."""
    batch = open_trace(folder).read(0, 1)
    return {
        (key.role, key.slot): key
        for key in batch.keys
        if key.boundary == "weight" and (key.role != "grad" or key.phase == "clip")
    }


@pytest.mark.parametrize("has_master", [False, True])
def test_gradients_and_states_have_their_place_in_the_parameter(tmp_path, has_master):
    train(tmp_path / "run", has_master=has_master, padding=2)

    keys = recorded(tmp_path / "run")
    ours = [("optimizer_state", "momentum_buffer")]
    ours += [("main_grad", "main_grad"), ("master", "master")] if has_master else []
    for name in ours if has_master else [*ours, ("grad", "grad")]:
        placement = keys[name].placement
        assert (keys[name].shape, placement.logical_shape) == ((6,), (3, 4))
        assert placement.spec == "* | flat[dp@6:12]"
    assert (("master", "master") in keys) == has_master  # a view of the weights is no master
    assert keys["param", "value"].shape == (3, 4)


def test_what_it_says_changes_no_bit(tmp_path):
    model, own, optimizer = make()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        own.grad = gradient_of(model, len(own))
        optimizer.step()

    assert torch.equal(own, train(tmp_path / "run"))


@pytest.mark.parametrize(
    ("elements", "sentence"),
    [
        ({"other": (0, 1)}, "cannot find elements 0 to 1 of 'other': no model has it"),
        ({"bias": (0, 4)}, "cannot find elements 0 to 4 of 'bias': it has 3"),
        ({"weight": (0, 12)}, r"12 elements do not lie in a tensor of shape \[9\]"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, elements, sentence):
    with pytest.raises(ConfigError, match=sentence):
        train(tmp_path / "run", elements)


def test_observe_places_a_slice_of_a_parameter_and_of_a_tensor_of_written_sizes(tmp_path):
    model, own, optimizer = make()
    config = {"output_dir": str(tmp_path / "run")}
    with upguard_plugin.enable(model, optimizer, config, layout=OF_TWO) as guard:
        model(torch.ones(2, 4)).sum().backward()
        guard.observe("weight", own[:6], role="master", placement="o i | flat[dp]")
        guard.observe("other", own[:6], placement="4 3 | flat[dp]")
        guard.observe("padded", own[:6], placement="11 | flat[dp]~11")
        with pytest.raises(PlacementError, match="write its sizes as numbers"):
            guard.observe("unknown", own[:6], placement="o i | flat[dp]")
        guard.step()

    batch = open_trace(tmp_path / "run").read(0, 0)
    found = {key.boundary: key.placement for key in batch.keys if key.placement is not None}
    assert [found[name].logical_shape for name in ("other", "padded")] == [(4, 3), (11,)]
    named = ((key.boundary, key.role) for key in batch.keys)
    master = dict(zip(named, batch.keys, strict=True))["weight", "master"].placement
    assert (master.logical_shape, master.pieces[0].local_start) == ((3, 4), 0)


def test_a_guard_that_records_nothing_takes_it_too():
    model, own, optimizer = make()

    upguard_plugin.enable(model, optimizer, {"enabled": False}).slices(own, {"other": (0, 1)})
