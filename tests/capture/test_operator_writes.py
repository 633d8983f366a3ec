"""What an operator writes is known, whatever its schema says."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capture.operator_run import events_of, train
from upguard_plugin.capture.extents import is_tracked
from upguard_plugin.capture.operators.arguments import tensors_given, tensors_returned
from upguard_plugin.capture.operators.schema import UNANNOTATED_WRITES, describe

ONES, ZEROS = torch.ones, torch.zeros
ON_A_CPU = {"aten::native_batch_norm", "aten::batch_norm_update_stats"}  # the others need a GPU


def batch_norm_arguments(name: str) -> tuple[Any, ...]:
    x, mean, var = torch.randn(4, 3, 2), torch.zeros(3), torch.ones(3)
    weight, bias, counts = torch.ones(3), torch.zeros(3), torch.full((2,), 4.0)
    stats = torch.randn(2, 3), torch.rand(2, 3) + 1
    return {
        "aten::native_batch_norm": (x, weight, bias, mean, var, True, 0.1, 1e-5),
        "aten::batch_norm_update_stats": (x, mean, var, 0.1),
        "aten::batch_norm_gather_stats": (x, *stats, mean, var, 0.1, 1e-5, 4),
        "aten::batch_norm_gather_stats_with_counts": (x, *stats, mean, var, 0.1, 1e-5, counts),
        "aten::cudnn_batch_norm": (x, weight, bias, mean, var, True, 0.1, 1e-5),
        "aten::miopen_batch_norm": (x, weight, bias, mean, var, True, 0.1, 1e-5),
    }[name]


class Watch(TorchDispatchMode):
    """Collects the operators that write or return an argument without being known to do so."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.silent_views: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = describe(func)
        given = dict(enumerate(args)) | kwargs
        silent = {
            key: _bytes(value)
            for key, value in given.items()
            if isinstance(value, torch.Tensor)
            and is_tracked(value)
            and value.device.type == "cpu"
            and key not in operator.written
            and not any(_shares(value, given[other]) for other in operator.written)
        }
        result = func(*args, **kwargs)
        self.seen.add(operator.name)
        for key, before in silent.items():
            if _bytes(given[key]) != before:
                self.silent.add(f"{operator.name} {key}")
        if not operator.is_view and operator.looked_at is not None:
            others = [
                a.tensor for a in tensors_given(args, kwargs) if a.key not in operator.written
            ]
            returned = [r.tensor for r in tensors_returned(result) if r.tensor.numel()]
            if any(is_tracked(r) and _shares(r, others) for r in returned):
                self.silent_views.add(operator.name)
        return result


def _bytes(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return bytes(storage) if storage.nbytes() < 1 << 16 else b""


def _shares(tensor: torch.Tensor, other: Any) -> bool:
    others = other if isinstance(other, (list, tuple)) else [other]
    return any(
        isinstance(o, torch.Tensor)
        and is_tracked(o)
        and o.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        for o in others
    )


def overload_of(name: str) -> torch._ops.OpOverload:
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator).default


@pytest.mark.parametrize("name", sorted(UNANNOTATED_WRITES.keys() - ON_A_CPU))
def test_silent_writes_that_are_not_tried_here_have_no_kernel_here(name):
    with pytest.raises(NotImplementedError):
        overload_of(name)(*batch_norm_arguments(name))


@pytest.mark.parametrize("name", sorted(ON_A_CPU))
def test_the_table_of_silent_writes_says_what_is_written(name):
    overload = overload_of(name)
    arguments = batch_norm_arguments(name)
    before = [_bytes(a) if isinstance(a, torch.Tensor) else None for a in arguments]
    overload(*arguments)
    changed = {
        position
        for position, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor) and _bytes(argument) != before[position]
    }
    assert changed == describe(overload).written


def test_running_statistics_have_the_batch_norm_for_their_writer(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.fc(x)) + self.norm.running_mean * 2

    events = events_of(train(tmp_path / "run", Net()))
    written = [e for e in events if e.operator == "aten.native_batch_norm" and e.moment == "after"]
    assert {e.slot for e in written} == {"args.3", "args.4"}
    (read,) = [
        e for e in events if e.operator == "aten.mul" and e.phase == "forward" and e.role == "input"
    ]
    assert (read.h, read.producer) == (written[0].h, "aten.native_batch_norm")


Samples = Callable[[], list[tuple[Any, tuple, dict]]]


@pytest.mark.long
def test_no_operator_of_torch_writes_or_returns_what_it_is_not_known_to(monkeypatch):
    # torch's samples import a package that only torch's own tests need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db  # slow to load

    watch = Watch()
    for info in op_db:
        if not info.supports_dtype(torch.float32, "cpu"):
            continue
        try:
            samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))[:4]
        except Exception:  # a sample that needs what this machine lacks
            continue
        for sample in samples:
            with watch:
                try:
                    info.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # samples are also made to be refused
                    continue
    assert watch.silent == set()
    assert watch.silent_views == set()
    assert len(watch.seen) > 400


def test_a_custom_operator_that_hides_a_write_does_not_leave_an_old_hash(tmp_path):
    library = torch.library.Library("upguard_test", "FRAGMENT")
    library.define("hidden(Tensor x) -> Tensor")

    def hidden(x: torch.Tensor) -> torch.Tensor:
        x.numpy()[0, 0] = 7.0
        return x.clone()

    library.impl("hidden", hidden, "CPU")

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.upguard_test.hidden(y)
        return model(y * 1)

    events = events_of(train(tmp_path / "run", nn.Linear(4, 4), forward=forward))
    (before,) = [e for e in events if e.operator == "upguard_test.hidden" and e.role == "input"]
    inputs = [e for e in events if e.operator == "aten.mul" and e.role == "input"]
    assert inputs[1].h != before.h


def test_what_numpy_writes_is_seen_by_the_next_reader_and_not_blamed_on_it(tmp_path):
    """An exported array is never trusted: its next reader is hashed, not one in so many."""

    def forward(write: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
        def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            array = y.numpy()
            if write:
                array[1, 2] += np.float32(1)
            return model(y * 1)

        return run

    events = [
        events_of(train(tmp_path / str(write), nn.Linear(4, 4), forward=forward(write)))
        for write in (False, True)
    ]
    made = [
        next(e for e in run if e.operator == "aten.mul" and e.role == "output") for run in events
    ]
    read = [[e for e in run if e.operator == "aten.mul" and e.role == "input"][1] for run in events]
    assert made[0].h == made[1].h
    assert read[0].h != read[1].h
    assert read[1].producer == "aten.mul"
