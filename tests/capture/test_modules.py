"""What the module probe records of forward and backward calls."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from recorded import Recorded, guarded, record_steps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from upguard_plugin.fingerprint.reference import fingerprint_array


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Stack(nn.Module):
    def __init__(self, run_block=lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.run_block = run_block

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return x


def train(model, *inputs, **named):
    def step(guard):
        model(*inputs, **named).sum().backward()

    return step


def hash_of(tensor):
    return fingerprint_array(tensor.detach().numpy()).h


MODULE_ROLES = ["input", "output", "grad_input", "grad_output"]


def recorded_modules(run, model, step, steps=1, **settings):
    """Only what the module probe records."""
    return record_steps(run, model, step, steps, roles=MODULE_ROLES, **settings)


def places(events):
    return [(e.phase, e.boundary, e.role, e.slot, e.call) for e in events]


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


@dataclass
class Options:
    mask: torch.Tensor
    ratio: float


Pair = namedtuple("Pair", "first second")


class Nested(nn.Module):
    def forward(self, x, options, *, pair, extra=None, mode="fast", flags=()):
        return OrderedDict(hidden=x * options.mask, pair=Pair(pair.first, [pair.second, 3]))


def test_nested_arguments_and_outputs_are_taken_apart(tmp_path):
    model = Nested()
    options = Options(torch.ones(2), 0.5)
    pair = Pair(torch.zeros(1), {"deep": torch.zeros(2)})

    def step(guard):
        model(torch.ones(2), options, pair=pair, flags=[True, 2], extra=None)

    run = recorded_modules(tmp_path / "run", model, step)

    assert [(e.slot, e.dtype, e.shape) for e in run.events] == [
        ("args.0", "float32", (2,)),
        ("args.1.mask", "float32", (2,)),
        ("args.1.ratio", "float64", ()),
        ("kwargs.pair.first", "float32", (1,)),
        ("kwargs.pair.second.deep", "float32", (2,)),
        ("kwargs.flags.0", "bool", ()),
        ("kwargs.flags.1", "int64", ()),
        ("kwargs.extra", "none", (0,)),
        ("out.hidden", "float32", (2,)),
        ("out.pair.first", "float32", (1,)),
        ("out.pair.second.0.deep", "float32", (2,)),
        ("out.pair.second.1", "int64", ()),
    ]


class Cache:
    """A class the probe knows nothing of."""


class Opaque(nn.Module):
    def forward(self, x, cache):
        return x


def test_what_cannot_be_looked_into_is_said(tmp_path):
    model = Opaque()
    run = recorded_modules(
        tmp_path / "run", model, lambda guard: model(torch.ones(1), cache=Cache())
    )
    assert run.end.notes == ("arguments of class Cache were not recorded",)


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


def test_a_model_compiled_after_the_guard_is_attached_still_compiles_whole(tmp_path):
    model = Block()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run = recorded_modules(tmp_path / "run", model, train(compiled, torch.ones(1, 4)), steps=2)
    assert run.end.complete


def test_calls_with_fake_tensors_are_skipped_and_said(tmp_path):
    model = nn.Linear(2, 2)

    def step(guard):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(1, 2))

    run = recorded_modules(tmp_path / "run", model, step)
    assert run.end.complete
    assert run.end.notes == ("module calls with fake tensors were not recorded",)


def test_one_tensor_without_bytes_does_not_end_the_recording(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    run = recorded_modules(
        tmp_path / "run", model, lambda guard: model(torch.ones(2, device="meta"))
    )
    assert run.end.complete
    assert run.events == []
    assert {note.split(" was ")[0] for note in run.end.notes} >= {
        "a tensor of (root)",
        "a tensor of 0",
        "a tensor of 1",
    }


@pytest.mark.parametrize(
    "value, recorded, note",
    [
        (torch.eye(3).to_sparse(), [("float32", (3, 3))], ""),
        (torch.ones(2, dtype=torch.complex64).conj(), [("complex64", (2,))], ""),
        (torch.empty(0), [("float32", (0,))], ""),
        (torch.ones(2, 2, dtype=torch.float8_e4m3fn), [("float8_e4m3fn", (2, 2))], ""),
        (torch.ones(2, 3).t(), [("float32", (3, 2))], ""),
        (float("nan"), [("float64", ())], ""),
        (10**30, [("int", (25,))], ""),
        (None, [("none", (0,))], ""),
        ("left", [("str", (4,))], ""),
        (range(3), [], "arguments of class range were not recorded"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            [],
            "a nested tensor of (root) was not recorded",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_odd_arguments_are_recorded_or_said(tmp_path, value, recorded, note):
    model = nn.Identity()
    run = recorded_modules(tmp_path / "run", model, lambda guard: model(value))
    assert [(e.dtype, e.shape) for e in run.find(role="input")] == recorded
    assert run.end.complete
    assert (note in run.end.notes) == bool(note)


def test_a_script_module_is_left_alone_and_said(tmp_path):
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    run = recorded_modules(tmp_path / "run", model, train(model, torch.ones(1, 2)))
    assert {e.boundary for e in run.events} == {"(root)", "1"}
    assert run.end.notes == ("0 was not recorded: a ScriptModule takes no hooks",)
