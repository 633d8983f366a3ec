"""Models that are compiled, scripted, copied, vmapped, or fail: left as they are."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import Counter

import torch
from module_run import Block, Stack, recorded_modules, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

UNSEEN = (
    "never fired: hooks in {}: these modules were not called, or in code only that torch.compile "
    "compiled"
)


class ViewThenWrite(nn.Module):
    """Returns a view of an activation and then lets the caller write into its base."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y[:, :2], y.expand(3, *y.shape), y


def test_views_expanded_outputs_and_writes_into_their_base_do_not_break_backward(tmp_path):
    model = ViewThenWrite()

    def step(guard):
        view, expanded, base = model(torch.ones(2, 4))
        loss = expanded.sum()
        base.mul_(2)
        (view.sum() + loss + base.sum()).backward()

    run = recorded_modules(tmp_path / "run", model, step)
    assert run.end.complete
    assert [e.slot for e in run.find(boundary="(root)", role="output")] == [
        "out.0",
        "out.1",
        "out.2",
    ]


def test_a_compiled_submodule_keeps_its_boundary_and_hides_its_inside(tmp_path):
    model = Stack()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1].compile(backend="eager")

    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(1, 4)))

    assert {e.boundary for e in run.events} == {"(root)", "embed", "blocks.0", "blocks.1"}
    assert run.end.notes == (
        "inside blocks.0 nothing was recorded: it is compiled",
        "inside blocks.1 nothing was recorded: it is compiled",
    )
    for block in ("blocks.0", "blocks.1"):
        assert [e.role for e in run.find(boundary=block)] == [
            "input",
            "output",
            "grad_output",
            "grad_input",
        ]


def test_a_hook_that_the_program_adds_later_stands_beside_ours(tmp_path):
    """Also where the last module takes no hooks, because it is compiled in place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].compile(backend="eager")
    seen = []

    def step(guard):
        handle = model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
        other = model[0].register_forward_hook(lambda module, args, output: seen.append("after"))
        model(torch.ones(1, 4)).sum().backward()
        handle.remove()
        other.remove()

    run = recorded_modules(tmp_path / "run", model, step, steps=2)

    assert seen == ["before", "after"] * 2
    for step_ in (0, 1):
        roles = [e.role for e in run.find(boundary="0", step=step_)]
        assert roles == ["input", "output", "grad_output"]


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fail = True

    def forward(self, x):
        y = self.fc(x)
        if self.fail:
            raise RuntimeError("out of memory")
        return y


def test_an_exception_in_forward_leaves_the_probe_ready_for_the_next_call(tmp_path):
    model = nn.Sequential(Failing(), nn.Linear(4, 4))

    def step(guard):
        try:
            model(torch.ones(1, 4))
        except RuntimeError:
            model[0].fail = False
            model(torch.ones(1, 4)).sum().backward()

    run = recorded_modules(tmp_path / "run", model, step)

    assert run.end.complete
    assert [e.call for e in run.find(boundary="0", role="input")] == [0, 1]
    assert [e.call for e in run.find(boundary="0", role="output")] == [1]
    assert {e.phase for e in run.find(role="output")} == {"forward"}


def test_calls_inside_vmap_are_skipped_and_said(tmp_path):
    model = nn.Linear(2, 2)
    run = recorded_modules(
        tmp_path / "run", model, lambda guard: torch.vmap(model)(torch.ones(3, 2))
    )
    assert run.events == []
    assert run.end.notes == ("module calls inside vmap, grad or jvp were not recorded",)


def test_hooks_keep_no_activation_alive(tmp_path):
    model = Stack()
    alive = []
    model.embed.register_forward_hook(lambda m, a, out: alive.append(weakref.ref(out)))

    def step(guard):
        gc.disable()
        try:
            loss = model(torch.ones(1, 4)).sum()
            assert alive[-1]() is not None
            loss.backward()
            del loss
            assert alive[-1]() is None
        finally:
            gc.enable()

    assert recorded_modules(tmp_path / "run", model, step, steps=2).end.complete


def test_a_copy_of_a_recorded_model_is_not_recorded(tmp_path):
    model = Block()
    pickled = io.BytesIO()

    def step(guard):
        average = copy.deepcopy(model)
        average(torch.ones(1, 4))
        torch.save(model, pickled)
        pickled.seek(0)
        torch.load(pickled, weights_only=False)(torch.ones(1, 4))
        model(torch.zeros(1, 4))

    run = recorded_modules(tmp_path / "run", model, step)
    assert [e.call for e in run.find(boundary="(root)", role="input")] == [0]


def test_a_model_compiled_after_the_guard_is_attached_still_compiles_whole_and_that_is_said(
    tmp_path,
):
    torch._dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run = recorded_modules(tmp_path / "run", model, train(compiled, torch.ones(1, 4)), steps=2)
    assert {e.boundary for e in run.events} == {"(root)"}
    assert run.end.notes == (UNSEEN.format("fc1, fc2"),)


def test_containers_of_torch_that_are_compiled_later_are_said(tmp_path):
    """The compiler takes their hooks into its code, where they do nothing."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    run = recorded_modules(tmp_path / "run", model, train(compiled, torch.ones(1, 4)))
    assert run.end.notes == (UNSEEN.format("(root), 0, 1"),)


def test_a_submodule_that_is_compiled_later_is_said(tmp_path):
    torch._dynamo.reset()
    model = Stack()

    def step(guard):
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        model.blocks[1].compile(backend="eager")
        train(model, torch.ones(1, 4))(guard)

    run = recorded_modules(tmp_path / "run", model, step)
    assert {e.boundary for e in run.events} == {"(root)", "embed", "blocks.0", "blocks.1"}
    assert run.end.notes == (UNSEEN.format("blocks.0.fc1, blocks.0.fc2, blocks.1.fc1 and 1 more"),)


def test_a_model_that_was_compiled_and_run_before_its_bare_self_is_recorded_is_said(tmp_path):
    torch._dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 4))
    run = recorded_modules(tmp_path / "run", model, train(compiled, torch.ones(1, 4)))
    assert run.end.notes == (UNSEEN.format("fc1, fc2"),)


def test_modules_that_are_not_called_are_not_said_where_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Counter())
    model = Stack()
    run = recorded_modules(tmp_path / "run", model, train(model.blocks[0], torch.ones(1, 4)))
    assert run.end.notes == ()


def test_calls_with_fake_tensors_are_skipped_and_said(tmp_path):
    model = nn.Linear(2, 2)

    def step(guard):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(1, 2))

    run = recorded_modules(tmp_path / "run", model, step)
    assert run.end.complete
    assert run.end.notes == ("module calls with fake tensors were not recorded",)


def test_a_script_module_is_left_alone_and_said(tmp_path):
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(1, 2)))
    assert {e.boundary for e in run.events} == {"(root)", "1"}
    assert run.end.notes == ("0 was not recorded: a ScriptModule takes no hooks",)
