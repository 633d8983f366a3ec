"""Activations sample by sample: what is recorded, and how runs match by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import upguard_plugin
from tests.cases.case import seed_all, verdict_of
from upguard_plugin.compare.layouts.shares import is_rounding
from upguard_plugin.compare.layouts.units import Units, samples_in, samples_of
from upguard_plugin.placement import without_dim
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.trace.reader import open_trace

RULES = {"*": {"input": "b h", "output": "b h", "grad_input": "b h", "grad_output": "b h"}}


def train(config, microbatches=1, order=(0, 1, 2, 3)) -> torch.Tensor:
    """One step on 4 samples; the weights at its end."""
    seed_all()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.arange(12.0).view(4, 3)[list(order)]
    with upguard_plugin.enable(model, optimizer, config, placements=RULES) as guard:
        for k, part in enumerate(batch.chunk(microbatches)):
            guard.microbatch(k)
            model(part).sum().backward()
        optimizer.step()
        guard.step()
    return model[0].weight.detach()


def test_samples_are_recorded_one_by_one_and_the_weights_do_not_change(tmp_path):
    off = train({"enabled": False})
    on = train({"output_dir": str(tmp_path / "run"), "samples": True})

    assert torch.equal(on, off)
    batch = open_trace(tmp_path / "run").read(0, 0)
    outputs = [k for k in batch.keys if (k.boundary, k.role) == ("0", "output")]
    assert [(key.slot, key.shape) for key in outputs] == [(f"0[{i}]", (3,)) for i in range(4)]
    gradients = [k for k in batch.keys if (k.boundary, k.role) == ("0", "grad_output")]
    assert {key.slot for key in gradients} == {f"0[{i}]" for i in range(4)}


@pytest.mark.parametrize("microbatches", [2, 4])
def test_one_layout_with_other_micro_batches_is_compared_by_samples(tmp_path, microbatches):
    train({"output_dir": str(tmp_path / "one"), "samples": True})
    train({"output_dir": str(tmp_path / "more"), "samples": True}, microbatches)

    verdict = verdict_of(tmp_path / "one", tmp_path / "more", "--exact")

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    assert verdict["coverage"]["compared"] > 40


def sampled(microbatches: list[list[int]]) -> EventBatch:
    """A rank whose micro-batches hold these samples."""
    places = [(k, i, h) for k, hashes in enumerate(microbatches) for i, h in enumerate(hashes)]
    keys = [EventKey("x", "data", "sample", str(i), "int64", (1,)) for _, i, _ in places]
    numbers = np.arange(len(keys), dtype=np.int32)
    microbatch = np.array([k for k, _, _ in places], np.int32)
    words = np.array([h for _, _, h in places], np.uint64)
    return EventBatch(
        0, keys, numbers, numbers.astype(np.int64), microbatch, numbers * 0, words, words
    )


def units_of(baseline: list[list[int]], target: list[list[int]]) -> Units:
    batches = sampled(baseline), sampled(target)
    places = [{(0, k) for k in set(batch.microbatch.tolist())} for batch in batches]
    held = [samples_of(samples_in(batch)) for batch in batches]
    return Units.of((held[0], held[1]), (places[0], places[1]))


def test_equal_micro_batches_are_units_of_their_own():
    units = units_of([[1, 2], [3, 4]], [[3, 4], [1, 2]])

    assert units.baseline.number == {(0, 0): 0, (0, 1): 1}
    assert units.target.number == {(0, 0): 1, (0, 1): 0}
    assert not units.joined
    assert not units.same_order


def test_micro_batches_that_share_samples_are_one_unit():
    units = units_of([[1, 2, 3, 4], [5]], [[1, 2], [3, 4], [5]])

    assert units.target.number == {(0, 0): 0, (0, 1): 0, (0, 2): 1}
    assert units.target.positions[0, 1] == [2, 3]
    assert units.joined == {0}
    assert units.in_line == {1}  # two micro-batches are no batch


def test_a_batch_in_another_order_is_compared_by_its_samples():
    units = units_of([[1, 2]], [[2, 1]])

    assert units.target.positions[0, 0] == [1, 0]
    assert units.joined == {0}


def test_duplicates_are_matched_in_order_and_a_changed_sample_has_a_partner():
    units = units_of([[7, 7, 1]], [[7, 7, 2]])

    assert units.target.positions[0, 0] == [0, 1, 2]
    assert not units.same_samples
    assert not units.joined


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("b s h", (0, "s h")),
        ("s[cp:zigzag] b h +tp", (1, "s[cp:zigzag] h +tp")),
        ("* b[dp] h", (-2, "* h")),
        ("(b s) h", None),
        ("b[tp] h", None),
        ("b~3 h", None),
    ],
)
def test_a_sample_lies_where_the_batch_does_without_its_dim(text, rest):
    assert without_dim(text, "b", "dp") == rest


def test_sums_of_other_shares_may_round_and_no_more():
    assert is_rounding(1.0, 1.0 + 2**-22, 4, "float32")
    assert not is_rounding(1.0, 1.0 + 2**-22, 4, "float64")
    assert not is_rounding(1.0, 1.0, 4, "float32")
    assert not is_rounding(1.0, 2.0, 2, "float32")
