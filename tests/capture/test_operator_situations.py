"""Level `op` where tensors, modes and calls are not the plain ones."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.capture.operator_run import calls_of, events_of, train
from upguard_plugin.trace.reader import open_trace


def named(run: Any, operator: str, **fields: Any) -> list[Any]:
    wanted = {"operator": operator} | fields
    return [e for e in events_of(run) if all(getattr(e, k) == v for k, v in wanted.items())]


def weights(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 4)


# Tensors


def test_inference_tensors_are_recorded(tmp_path):
    def forward(model, x):
        with torch.inference_mode():
            y = x * 3
            y.add_(1)
            z = y * 2
        return model(z.clone())

    run = train(tmp_path / "run", linear(), forward=forward)
    (after,) = named(run, "aten.add_", moment="after", phase="start")
    assert named(run, "aten.mul", role="input")[1].h == after.h


def test_sparse_and_empty_tensors_are_recorded(tmp_path):
    def forward(model, x):
        sparse = torch.eye(4).to_sparse()
        values = sparse._values()
        before = values * 1
        sparse.sin_()
        after = values * 1
        empty = torch.ones(0, 4) * 2
        return model(torch.sparse.mm(sparse, x.t()).t() + empty.sum() + (after - before).sum())

    run = train(tmp_path / "run", linear(), forward=forward)
    reads = list(named(run, "aten.mul", role="input", slot="args.0"))
    assert reads[0].h != reads[1].h
    assert named(run, "aten._sparse_mm") or named(run, "aten._sparse_addmm")


def test_memory_that_nobody_wrote_is_never_hashed(tmp_path):
    def forward(model, x):
        buffer = torch.empty(4, 4)
        buffer[:2].copy_(x)
        part = buffer[:2] * 1  # written
        whole = buffer * 1  # half of it is not: the other half is hashed
        buffer[2:].zero_()
        full = buffer * 1
        columns = torch.empty(2, 4)
        columns[:, :2] = 1
        columns * 1
        columns[:, 2:] = 2
        done = columns * 1
        return model(part + whole[:2] * 0 + full[2:] + done)

    run = train(tmp_path / "run", linear(), forward=forward)
    calls = [e.call for e in named(run, "aten.mul", phase="start", role="input", slot="args.0")]
    assert calls == [0, 1, 2, 4, 5]


def test_a_storage_that_is_freed_and_filled_anew_has_a_new_hash(tmp_path):
    def forward(model, x):
        y = x * 2
        y * 1
        storage = y.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        keep = torch.ones(64)
        storage.resize_(size)
        ctypes.memset(storage.data_ptr(), 0, size)
        z = y * 1
        return model(z + keep[0])

    run = train(tmp_path / "run", linear(), forward=forward)
    reads = named(run, "aten.mul", role="input", slot="args.0")
    assert reads[1].h != reads[2].h


def test_data_that_is_replaced_is_read_anew(tmp_path):
    def forward(model, x):
        y = x * 2
        y * 1
        y.data = torch.full((2, 4), 5.0)
        y * 1
        y.data.add_(1)
        return model(y * 1)

    run = train(tmp_path / "run", linear(), forward=forward)
    reads = named(run, "aten.mul", role="input", slot="args.0")[1:]
    assert len({e.h for e in reads}) == 3
    assert reads[2].producer == "aten.add_"


def test_operators_inside_a_subclass_are_recorded_once(tmp_path):
    def forward(model, x):
        y = TwoTensor(x, x + 1) * 5
        return model(y.a + y.b)

    run = train(tmp_path / "run", linear(), forward=forward)
    assert [c.call for c in calls_of(run) if c.operator == "aten.mul"] == [0, 1]


# Modes


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(f"{func} {[t.__name__ for t in types]}")
        return func(*args, **(kwargs or {}))


class FunctionCounts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def fed(model: nn.Module, x: torch.Tensor, mode: Any) -> torch.Tensor:
    with mode:
        y = TwoTensor(x, x + 1) * 2
        return model(y.a + y.t().t().b)


@pytest.mark.parametrize("kind", [Counts, FunctionCounts])
def test_a_mode_above_sees_what_it_sees_without_us(tmp_path, kind):
    seen = []
    for enabled in (True, False):
        above = kind()
        forward = partial(fed, mode=above)
        train(tmp_path / str(enabled), linear(), forward=forward, enabled=enabled)
        seen.append(above.seen)
    assert seen[0] == seen[1]


def test_a_mode_below_sees_what_it_sees_without_us(tmp_path):
    seen = []
    for enabled in (True, False):
        with Counts() as below:
            forward = partial(fed, mode=nullcontext())
            train(tmp_path / str(enabled), linear(), forward=forward, enabled=enabled)
        seen.append(below.seen)
    assert seen[0] == seen[1]


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mode", [Counts, partial(FlopCounterMode, display=False)])
def test_what_is_called_through_a_mode_is_called_from_behind_it(tmp_path, one_rank, mode):
    def places(folder):
        run = train(folder, nn.parallel.DistributedDataParallel(linear()))
        batch = open_trace(run).read(0, 0)
        return [
            (key.phase, key.boundary, key.operator, key.source)
            for key in (batch.key_of(row) for row in range(len(batch)))
            if key.operator is not None
        ]

    alone = places(tmp_path / "alone")
    with mode():
        assert places(tmp_path / "under") == alone
    named = [place for place in alone if place[2] == "c10d.allreduce_"]
    assert {place[:2] for place in named} == {
        ("grad_sync", "all_reduce[world] bucket 0 (weight, bias)")
    }


def test_autocast_and_functorch_are_recorded(tmp_path):
    def forward(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        per_sample = torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))(x)
        return y.float() + per_sample

    run = train(tmp_path / "run", linear(), forward=forward)
    dtypes = {e.operator for e in events_of(run)}
    assert {"aten._to_copy", "aten.addmm", "aten.mul"} <= dtypes


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_regions_keep_their_boundary_and_their_bits(tmp_path, backend):
    def build() -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(linear(), nn.GELU(), linear())
        model[1] = torch.compile(nn.Sequential(nn.GELU(), nn.Tanh()), backend=backend)
        return model

    recorded, plain = build(), build()
    run = train(tmp_path / "run", recorded, steps=2)
    plain = build()
    train(tmp_path / "off", plain, steps=2, enabled=False)
    assert weights(recorded) == weights(plain)
    assert any("compiled" in note for note in open_trace(run).end(0).notes)


# Calls


class Twice(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.lin, self.reentrant = linear(), reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, x * 1.5, use_reentrant=self.reentrant)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_operators_carry_the_number_of_their_forward(tmp_path, reentrant):
    def forward(model, x):
        return model(x.requires_grad_())

    run = train(tmp_path / "run", Twice(reentrant), forward=forward)
    made = {e.call: e.h for e in named(run, "aten.addmm", phase="forward", role="output")}
    again = [(e.call, e.h) for e in named(run, "aten.addmm", phase="recompute", role="output")]
    assert len(made) == 2
    assert again == [(1, made[1]), (0, made[0])]
    assert not [c for c in calls_of(run) if c.phase == "backward" and c.operator == "aten.sin"]
    assert {c.boundary for c in calls_of(run) if c.operator == "aten.mm"} == {"lin"}
    sines = {(c.phase, c.boundary) for c in calls_of(run) if c.operator == "aten.sin"}
    # Without re-entering the engine, what comes last is not wanted, and not repeated.
    assert sines == {("forward", "(root)")} | ({("recompute", "(root)")} if reentrant else set())


class Square(torch.autograd.Function):
    """Written in C, as far as torch can see."""

    extra = 0.0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        values = (ctypes.c_float * x.numel())(*[v * v for v in x.flatten().tolist()])
        values[1] += Square.extra
        ctypes.memmove(out.untyped_storage().data_ptr(), values, x.nbytes)
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def test_an_autograd_function_is_a_boundary_in_both_directions(tmp_path):
    run = train(tmp_path / "run", linear(), forward=lambda model, x: Square.apply(model(x)))
    assert [(e.phase, e.role) for e in named(run, "autograd.Square")] == [
        ("loss", "input"), ("loss", "output"), ("backward", "input"), ("backward", "output"),
    ]  # fmt: skip
    out = named(run, "autograd.Square", phase="loss", role="output")[0]
    total = named(run, "aten.sum", role="input")[0]
    assert (total.h, total.producer) == (out.h, "autograd.Square")


def test_double_backward_and_retained_graphs_are_recorded(tmp_path):
    def forward(model, x):
        x.requires_grad_()
        y = model(x).tanh().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        return second + first

    run = train(tmp_path / "run", linear(), forward=forward)
    assert {e.phase for e in named(run, "aten.tanh_backward")} == {"backward"}
    assert not [e for e in events_of(run) if e.phase == "recompute"]


def test_a_backward_in_another_thread_does_not_disturb_the_run(tmp_path):
    models = []
    for enabled in (True, False):
        model = linear()
        models.append(model)

        def forward(model, x):
            thread = threading.Thread(target=lambda: model(x).sum().backward())
            thread.start()
            thread.join()
            return model(x)

        train(tmp_path / str(enabled), model, forward=forward, enabled=enabled, steps=2)
    assert weights(models[0]) == weights(models[1])
