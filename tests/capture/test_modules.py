"""What the module probe records of forward and backward calls."""

from __future__ import annotations

import pytest
import torch
from module_run import Block, Stack, hash_of, places, recorded_modules, train
from recorded import Recorded, guarded, record_steps
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_events_come_in_program_order_with_gradients_after_forward(tmp_path):
    model = Block()

    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(3, 4)))

    assert places(run.events) == [
        ("forward", "(root)", "input", "args.0", 0),
        ("forward", "fc1", "input", "args.0", 0),
        ("forward", "fc1", "output", "0", 0),
        ("forward", "fc2", "input", "args.0", 0),
        ("forward", "fc2", "output", "0", 0),
        ("forward", "(root)", "output", "0", 0),
        ("backward", "(root)", "grad_output", "0", 0),
        ("backward", "fc2", "grad_output", "0", 0),
        ("backward", "fc2", "grad_input", "args.0", 0),
        ("backward", "fc1", "grad_output", "0", 0),
    ]


def test_fingerprints_are_those_of_the_tensors_and_gradients(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    seen = {}

    def step(guard):
        y = model(x)
        y.retain_grad()
        (y * y).sum().backward()
        seen.update(input=x, output=y, grad_input=x.grad, grad_output=y.grad)

    run = recorded_modules(tmp_path / "run", model, step)

    for role, tensor in seen.items():
        assert run.one(boundary="0", role=role).h == hash_of(tensor), role


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tools = nn.ModuleDict({"fc": nn.Linear(3, 3)})

    def forward(self, x):
        return self.tools["fc"](self.tools["fc"](x))


def test_calls_of_a_module_are_numbered_and_backward_carries_the_number(tmp_path):
    model = Twice()
    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(2, 3)))

    outputs = run.find(boundary="tools.fc", role="output")
    gradients = run.find(boundary="tools.fc", role="grad_output")
    assert [e.call for e in outputs] == [0, 1]
    assert [e.call for e in gradients] == [1, 0]


def test_backward_events_carry_the_micro_batch_of_their_forward(tmp_path):
    model = Block()

    def step(guard):
        losses = []
        for k in range(2):
            guard.microbatch(k)
            losses.append(model(torch.full((1, 4), k + 1.0)).sum())
        for loss in losses:  # both backwards while the position is at micro-batch 1
            loss.backward()

    run = recorded_modules(tmp_path / "run", model, step)

    found = [(e.microbatch, e.call) for e in run.find(boundary="fc1", role="grad_output")]
    assert found == [(0, 0), (1, 0)]


def test_a_module_that_returns_its_input_has_both_gradients(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(1, 2)))

    gradients = [(e.boundary, e.role) for e in run.find(phase="backward")]
    assert gradients == [
        ("(root)", "grad_output"),
        ("1", "grad_output"),
        ("1", "grad_input"),
        ("0", "grad_output"),
    ]


def test_an_output_changed_in_place_is_recorded_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(2, 4)
    before = model[0](x).detach()

    run = recorded_modules(tmp_path / "run", model, train(model, x))

    assert run.one(boundary="0", role="output").h == hash_of(before)
    relu = before.relu()
    assert run.one(boundary="1", role="output").h == hash_of(relu)
    # The gradient of what the linear layer returned is masked, that of the ReLU is not.
    masked = (before > 0).float()
    assert run.one(boundary="0", role="grad_output").h == hash_of(masked)
    ones = torch.ones(2, 4)
    assert run.one(boundary="1", role="grad_output").h == hash_of(ones)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_forward_events_only_and_the_phase_is_eval(tmp_path, context):
    model = Block()

    def step(guard):
        with context():
            model(torch.ones(1, 4))

    run = recorded_modules(tmp_path / "run", model, step)
    assert {e.phase for e in run.events} == {"eval"}
    assert {e.role for e in run.events} == {"input", "output"}


def test_a_model_in_eval_mode_is_in_phase_eval(tmp_path):
    model = Block().eval()
    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(1, 4)))
    assert {e.phase for e in run.find(role="output")} == {"eval"}


def test_what_follows_the_root_module_is_the_loss(tmp_path):
    model, criterion = Block(), nn.MSELoss()

    def step(guard):
        loss = criterion(model(torch.ones(1, 4)), torch.zeros(1, 4))
        guard.scalar("loss", loss)
        loss.backward()

    with guarded(tmp_path / "run", [model, criterion]) as guard:
        step(guard)
        guard.step()
    run = Recorded(tmp_path / "run")

    assert {e.phase for e in run.find(boundary="model1", role="output")} == {"loss"}
    assert run.one(boundary="loss", role="scalar").phase == "loss"
    assert {e.phase for e in run.find(boundary="model0.fc1", role="output")} == {"forward"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_labelled_and_matched_to_its_forward(tmp_path, reentrant):
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))

    def step(guard):
        losses = []
        for k in range(2):
            guard.microbatch(k)
            losses.append(model(torch.full((1, 4), k + 1.0)).sum())
        losses[0].backward()
        losses[1].backward()

    run = recorded_modules(tmp_path / "run", model, step)

    assert run.end.complete
    recomputed = run.find(phase="recompute", role="input")
    assert {e.boundary for e in recomputed} >= {"blocks.0", "blocks.0.fc1", "blocks.1.fc2"}
    for event in run.find(phase="recompute"):
        forward = run.one(
            phase="forward", boundary=event.boundary, role=event.role, slot=event.slot,
            call=event.call, microbatch=event.microbatch,
        )  # fmt: skip
        assert forward.h == event.h
    fc1 = run.find(phase="backward", boundary="blocks.1.fc1", role="grad_output")
    assert [e.microbatch for e in fc1] == [0, 1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_in_two_checkpointed_regions_is_matched_by_region(tmp_path, reentrant):
    shared = Block()

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = shared

        def forward(self, x):
            x = checkpoint(self.block, x, use_reentrant=reentrant)
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Shared()
    x = torch.ones(1, 4, requires_grad=True)
    run = recorded_modules(tmp_path / "run", model, train(model, x))

    recomputed = run.find(phase="recompute", boundary="block.fc1", role="input")
    assert [e.call for e in recomputed] == [1, 0]
    for event in recomputed:
        forward = run.one(phase="forward", boundary="block.fc1", role="input", call=event.call)
        assert forward.h == event.h


def test_the_producer_of_an_input_is_the_event_that_made_that_very_tensor(tmp_path):
    model = Block()
    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(1, 4)))

    fc2_in = run.one(boundary="fc2", role="input")
    assert fc2_in.producer == -1  # relu stands between
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = recorded_modules(tmp_path / "run2", model, train(model, torch.ones(1, 4)))
    assert run.one(boundary="1", role="input").producer == run.one(boundary="0", role="output").seq


@pytest.mark.parametrize("in_use, expected", [("first", 1), ("all", 2), ("off", 0)])
def test_weights_in_use(tmp_path, in_use, expected):
    model = Block()

    def step(guard):
        for k in range(2):
            guard.microbatch(k)
            model(torch.ones(1, 4)).sum().backward()

    run = record_steps(tmp_path / "run", model, step, weights_in_use=in_use)
    assert len(run.find(phase="forward", boundary="fc1.weight", role="param")) == expected


def test_a_leaf_input_that_stays_gets_one_event_per_backward(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(1, 4, requires_grad=True)

    def step(guard):
        for k in range(2):
            guard.microbatch(k)
            model(x).sum().backward()

    run = recorded_modules(tmp_path / "run", model, step, steps=2)

    found = [(e.step, e.microbatch) for e in run.find(boundary="0", role="grad_input")]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert x._backward_hooks is None


def test_level_stage_records_no_modules(tmp_path):
    model = Block()
    run = record_steps(
        tmp_path / "run", model, train(model, torch.ones(1, 4)), level="stage",
    )  # fmt: skip
    assert run.find(role="output") == run.find(role="grad_output") == []


def test_only_selected_modules_are_recorded(tmp_path):
    model = Stack()
    run = recorded_modules(
        tmp_path / "run", model, train(model, torch.ones(1, 4)), modules=["blocks.*", "!*.fc2"],
    )  # fmt: skip
    assert {e.boundary for e in run.events} == {
        "blocks.0", "blocks.0.fc1", "blocks.1", "blocks.1.fc1",
    }  # fmt: skip
