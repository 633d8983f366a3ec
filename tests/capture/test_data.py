from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch
from state_run import first_difference, recording
from torch import nn

from upguard_plugin.capture.data import argument_names
from upguard_plugin.fingerprint import fingerprint


class Reader(nn.Module):
    """Takes a batch the way models do: by position and by keyword."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 4)

    def forward(self, input_ids, mask=None, scale=1.0):
        hidden = self.embed(input_ids) * scale
        return hidden if mask is None else hidden * mask[..., None]


def test_a_batch_is_recorded_whole_and_per_sample_as_if_each_stood_alone():
    batch = torch.arange(12).reshape(3, 4)
    with recording(Reader(), ()) as (guard, run):
        guard.data("input_ids", batch)
        guard.step()

    (whole,) = run.where(role="data")
    assert (whole.boundary, whole.phase, whole.dtype) == ("input_ids", "data", "int64")
    assert (whole.h, whole.s) == (fingerprint(batch).h, fingerprint(batch).s)
    samples = run.where(role="sample")
    assert [(e.slot, e.shape) for e in samples] == [("0", (4,)), ("1", (4,)), ("2", (4,))]
    assert [(e.h, e.s) for e in samples] == [(fingerprint(b).h, fingerprint(b).s) for b in batch]


def test_samples_along_another_dim_are_the_same_samples():
    batch = torch.arange(12.0).reshape(3, 4)
    runs = []
    for tensor, dim in ((batch, 0), (batch.t(), 1)):
        with recording(Reader(), ()) as (guard, run):
            guard.data("x", tensor, batch_dim=dim)
            guard.step()
        runs.append([e.h for e in run.where(role="sample")])

    assert runs[0] == runs[1]


def test_nested_batches_have_names_that_are_paths():
    Pair = namedtuple("Pair", "first second")
    batch = {
        "input_ids": torch.ones(2, 3),
        "more": [Pair(torch.zeros(2), np.arange(2)), None],
        "bias": torch.ones(1, 3),
        "name": "part-7",
        "epoch": 3,
    }
    with recording(Reader(), ()) as (guard, run):
        guard.data("batch", batch)
        guard.step()

    assert [e.boundary for e in run.where(role="data")] == [
        "batch.input_ids", "batch.more.0.first", "batch.more.0.second", "batch.bias",
        "batch.name", "batch.epoch",
    ]  # fmt: skip
    sampled = dict.fromkeys(e.boundary for e in run.where(role="sample"))
    assert list(sampled) == ["batch.input_ids", "batch.more.0.first", "batch.more.0.second"]


def run_reader(batches, **keywords):
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer) as (guard, run):
        for k, batch in enumerate(batches):
            guard.microbatch(k)
            model(batch, **keywords).sum().backward()
        optimizer.step()
        guard.step()
    return run


def test_what_enters_the_model_is_the_batch_where_nothing_else_is_said():
    ids = torch.arange(6).reshape(2, 3)
    run = run_reader([ids, ids + 1], mask=torch.ones(2, 3), scale=2.0)

    data = [(e.microbatch, e.boundary) for e in run.where(role="data")]
    assert data == [(0, "input_ids"), (0, "mask"), (1, "input_ids"), (1, "mask")]
    first = next(i for i, e in enumerate(run) if e.role == "data")
    assert {e.phase for e in run[:first]} == {"start"}
    assert run[first].phase == "data"


def test_one_changed_token_is_found_as_data():
    # CASES 19
    ids = torch.arange(6).reshape(2, 3)
    changed = ids.clone()
    changed[1, 2] += 1

    found = first_difference(run_reader([ids, ids]), run_reader([ids, changed]))

    assert (found.step, found.microbatch, found.phase, found.role) == (0, 1, "data", "data")
    assert (found.boundary, found.dtype) == ("input_ids", "int64")
    assert first_difference(run_reader([ids, ids]), run_reader([ids, ids])) is None


def test_a_batch_said_by_hand_is_not_recorded_again():
    ids = torch.arange(6).reshape(2, 3)
    model = Reader()
    with recording(model, ()) as (guard, run):
        for k in range(2):
            guard.microbatch(k)
            guard.data("tokens", ids)
            model(ids)
        guard.step()

    assert [e.boundary for e in run.where(role="data")] == ["tokens", "tokens"]


def test_what_the_training_computed_is_no_batch():
    model = nn.Linear(3, 2)
    with recording(model, ()) as (guard, run):
        model(torch.ones(2, 3, requires_grad=True))
        guard.step()

    assert not run.where(role="data")


def test_batches_of_an_evaluation_belong_to_it():
    model = Reader().eval()
    with recording(model, ()) as (guard, run), torch.no_grad():
        model(torch.arange(3)[None])
        guard.step()

    assert {e.phase for e in run.where(role="data")} == {"eval"}


def test_a_read_only_array_is_read_without_a_warning(recwarn):
    array = np.arange(4)
    array.flags.writeable = False
    with recording(Reader(), ()) as (guard, run):
        guard.data("x", array)
        guard.step()

    assert len(run.where(role="sample")) == 4
    assert not recwarn.list


def test_argument_names_are_those_of_the_model_inside_all_wrappers():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs)

    assert argument_names(DistributedDataParallel(Reader())) == ("input_ids", "mask", "scale")
    assert argument_names(nn.Sequential()) == ("input",)
