"""Master weights: the names they take, and the states and gradients that are theirs."""

from __future__ import annotations

import torch
from optimizer_run import make_model
from state_run import first_difference, recording
from torch import nn

from upguard_plugin.capture.masters import match_masters


def run_masters(refresh):
    """Continue from loaded bfloat16 weights; the masters are refreshed, or stale."""
    model = make_model(torch.bfloat16)
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    if refresh:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.copy_(parameter.detach())
    with recording(model, optimizer) as (guard, run):
        for _ in range(2):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    master.grad = parameter.grad.float()
                optimizer.step()
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
                    parameter.grad = None
            guard.step()
    return run


def test_a_stale_master_is_found_at_start_under_its_weights_name():
    # CASES 17
    found = first_difference(run_masters(True), run_masters(False))

    assert (found.step, found.phase, found.role) == (0, "start", "master")
    assert (found.boundary, found.dtype) == ("0.weight", "float32")


def test_masters_have_states_gradients_and_an_identical_twin():
    run = run_masters(True)

    assert first_difference(run, run_masters(True)) is None
    assert {e.boundary for e in run.where(slot="exp_avg")} == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    assert len(run.where(step=0, role="main_grad", phase="clip")) == 4
    # The weights copied from the masters are recorded when the step ends.
    (copied,) = run.where(step=0, phase="optimizer", role="param", boundary="0.weight")
    (found,) = run.where(step=1, phase="start", role="param", boundary="0.weight")
    assert copied.h == found.h


def test_masters_are_matched_by_order_and_shape_or_numbered():
    a, b, frozen = (nn.Parameter(torch.ones(n)) for n in (2, 3, 4))
    frozen.requires_grad_(False)
    parameters = [("a", a), ("frozen", frozen), ("b", b)]

    assert match_masters([torch.ones(2), torch.ones(3)], parameters) == ["a", "b"]
    assert match_masters([torch.ones(2), torch.ones(4), torch.ones(3)], parameters) == [
        "a", "frozen", "b",
    ]  # fmt: skip
    assert match_masters([torch.ones(9)], parameters) == ["master0"]


def test_a_master_that_its_parameter_points_to_takes_its_name():
    # As Megatron does; by order alone two parameters of one shape would be confused.
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model = nn.Sequential(first, second)
    for layer in (first, second):
        layer.weight.main_param = layer.weight.detach().clone()
    optimizer = torch.optim.SGD([second.weight.main_param, first.weight.main_param], lr=0.1)
    with recording(model, optimizer) as (guard, run):
        model(torch.ones(2, 3))
        guard.step()

    masters = run.where(step=0, phase="start", role="master")
    weights = {e.boundary: e.h for e in run.where(step=0, phase="start", role="param")}

    assert [e.boundary for e in masters] == ["1.weight", "0.weight"]
    assert {e.boundary: e.h for e in masters} == weights
