"""Real DeepSpeed on two CPU ranks, which import it once."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from itertools import product

import deepspeed_faults as faults
import pytest
import torch
from deepspeed_runs import broken, last_events, merged, verdict
from deepspeed_training import Training, block, record_pipeline, train, train_without_sync
from memory_trace import hash_of

from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


EVERYDAY = {(0, "fp32", 1), (1, "bf16", 2), (2, "fp32", 2), (3, "bf16", 1), (0, "bf16", 2)}
MATRIX = [
    pytest.param(
        *one, marks=[] if one in EVERYDAY else pytest.mark.long, id="-".join(map(str, one))
    )
    for one in product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2))
]
TRAINABLE = {"0.weight", "0.bias", "1.weight", "3.weight", "3.bias"}


@pytest.mark.parametrize("stage, dtype, accumulation", MATRIX)
def test_twins_are_identical_and_everything_is_there(
    deepspeed_ranks, tmp_path, stage, dtype, accumulation
):
    plain = deepspeed_ranks.run(train, Training(stage, dtype, accumulation))
    runs = [tmp_path / "baseline", tmp_path / "target"]
    ends = [
        deepspeed_ranks.run(train, Training(stage, dtype, accumulation, upguard=block(run)))
        for run in runs
    ]

    for rank in (0, 1):
        for name, weight in plain[rank]["weights"].items():
            assert weight.equal(ends[0][rank]["weights"][name]), f"capture changed {name}"
    found = verdict(*runs)
    assert (found.verdict, found.coverage.not_comparable) == ("identical", 0), (
        found.notes,
        found.first_divergence,
    )
    for role, slot in (("optimizer_state", "exp_avg"), ("optimizer_state", "exp_avg_sq")):
        assert set(last_events(runs[0], "optimizer", role, slot)) == TRAINABLE
    has_masters = stage > 0 or dtype != "fp32"
    gradient = "main_grad" if has_masters else "grad"
    assert set(last_events(runs[0], "clip", gradient, gradient)) == TRAINABLE
    if has_masters:
        assert set(last_events(runs[0], "optimizer", "master", "master")) == TRAINABLE
    assert not open_trace(runs[0]).end(0).notes
    assert not broken(runs[0])


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
NO_CPU_ADAM = {"zero_force_ds_cpu_optimizer": False}
VARIANTS = {
    f"zero{stage}-{dtype}-{accumulation}": Training(stage, dtype, accumulation)
    for stage, dtype, accumulation in product((1, 2, 3), ("fp32", "bf16"), (1, 2))
} | {
    "bf16-optimizer": Training(1, "bf16", 2, config=FP32_GRADIENTS),
    "zero2-fp32-gradients": Training(2, "bf16", 2, config=FP32_GRADIENTS),
    "zero3-fp32-gradients": Training(3, "bf16", 2, config=FP32_GRADIENTS),
    "zero2-offload": Training(2, "bf16", 2, config=NO_CPU_ADAM, zero=OFFLOAD),
    "zero3-offload": Training(3, "bf16", 2, config=NO_CPU_ADAM, zero=OFFLOAD),
    "zero2-copies": Training(2, zero={"contiguous_gradients": False, "overlap_comm": True}),
    "zero3-all-reduce": Training(3, zero={"reduce_scatter": False}),
    "zero3-small-groups": Training(3, "bf16", zero={"sub_group_size": 20}),
}
OFTEN = ("zero1-fp32-1", "zero2-bf16-2", "zero3-fp32-2")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[] if v in OFTEN else pytest.mark.long) for v in VARIANTS],
)
def test_merged_parts_are_what_deepspeed_itself_puts_together(deepspeed_ranks, tmp_path, variant):
    stage = VARIANTS[variant].stage
    plain = deepspeed_ranks.run(train, VARIANTS[variant])
    for name in ("run", "again"):
        upguard = block(tmp_path / name)
        training = replace(VARIANTS[variant], upguard=upguard, keep_gradients=True)
        ends = deepspeed_ranks.run(train, training)

    for name, weight in plain[0]["weights"].items():
        assert weight.equal(ends[0]["weights"][name]), f"capture changed {name}"
    assert verdict(tmp_path / "run", tmp_path / "again").verdict == "identical"
    assert not broken(tmp_path / "run")

    masters = last_events(tmp_path / "run", "optimizer", "master", "master")
    assert set(masters) == TRAINABLE
    for name, parts in masters.items():
        assert merged(parts).h == hash_of(ends[0]["masters"][name]), name
    for slot in ("exp_avg", "exp_avg_sq"):
        moments = last_events(tmp_path / "run", "optimizer", "optimizer_state", slot)
        for name, parts in moments.items():
            assert merged(parts).h == hash_of(ends[0]["moments"][name, slot]), (name, slot)
    gradients = last_events(tmp_path / "run", "grad_sync", "main_grad", "main_grad")
    assert set(gradients) == TRAINABLE
    for name, parts in gradients.items():
        found = merged(parts)
        whole = ends[0]["gradients"][name].to(getattr(torch, found.dtype))
        assert found.h == hash_of(whole), name
    phase = "optimizer" if stage == 3 else "param_sync"
    weights = last_events(tmp_path / "run", phase, "param", "value")
    assert set(weights) >= TRAINABLE
    for name, parts in weights.items():
        assert merged(parts).h == hash_of(ends[0]["weights"][name]), name


def test_parameters_that_are_dealt_out_in_turn_keep_their_names(deepspeed_ranks, tmp_path):
    """DeepSpeed's own `safe_get_full_*` mix them up, so the weights themselves are what is true."""
    training = Training(2, zero={"round_robin_gradients": True}, upguard=block(tmp_path / "run"))
    ends = deepspeed_ranks.run(train, training)
    plain = Training(2, upguard=block(tmp_path / "plain"))
    deepspeed_ranks.run(train, plain)

    masters = last_events(tmp_path / "run", "optimizer", "master", "master")
    assert set(masters) == TRAINABLE
    for name, parts in masters.items():
        assert merged(parts).h == hash_of(ends[0]["weights"][name]), name
    dealt, in_order = (
        last_events(tmp_path / run, "grad_sync", "main_grad", "main_grad")
        for run in ("run", "plain")
    )
    assert set(dealt) == set(in_order) == TRAINABLE
    for name in TRAINABLE:
        assert merged(dealt[name]) == merged(in_order[name]), name


def test_a_step_that_overflows_is_marked_and_the_next_one_is_not(deepspeed_ranks, tmp_path):
    training = Training(
        1, "bf16", config={"bf16": {"check_grad_overflow": True}},
        upguard=block(tmp_path / "run"), fault=faults.gradient_that_overflows,
    )  # fmt: skip
    deepspeed_ranks.run(train, training)

    trace = open_trace(tmp_path / "run")
    assert [step.mark for step in trace.steps(0)] == ["skipped", None]
    found = []
    for step in (0, 1):
        batch = trace.read(0, step)
        rows = [r for r in range(len(batch)) if batch.key_of(r).boundary == "found_inf"]
        found += [batch.value[r] for r in rows]
    assert found == [1.0, 0.0]


def test_a_pipeline_is_recorded_by_microbatch_receives_and_sends_too(deepspeed_ranks, tmp_path):
    plain = record_pipeline(deepspeed_ranks, None)
    ends = record_pipeline(deepspeed_ranks, tmp_path / "baseline")
    record_pipeline(deepspeed_ranks, tmp_path / "target")

    for rank in (0, 1):
        for name, weight in plain[rank]["weights"].items():
            assert weight.equal(ends[rank]["weights"][name]), f"capture changed {name}"
    assert verdict(tmp_path / "baseline", tmp_path / "target").verdict == "identical"
    assert not broken(tmp_path / "baseline")
    trace = open_trace(tmp_path / "baseline")
    batch = trace.read(1, 1)
    seen = [
        (key.phase, int(batch.microbatch[row]), key.boundary.partition("[")[0])
        for row in range(len(batch))
        if (key := batch.key_of(row)).operator in ("c10d.send", "c10d.recv_")
        and key.moment == "completion"
    ]
    assert seen == [
        ("forward", 0, "recv"),
        ("backward", 0, "send"),
        ("forward", 1, "recv"),
        ("backward", 1, "send"),
    ]
    data = {(k.boundary, k.role) for k in batch.keys if k.role == "data"}
    assert data == {("labels", "data")}
    assert trace.layout(1).axis("pp").index == 1


@pytest.mark.parametrize(
    "stage, dtype",
    [
        pytest.param(*one, marks=[] if one == (1, "bf16") else pytest.mark.long)
        for one in ((0, "bf16"), (1, "fp32"), (1, "bf16"))
    ],
)
def test_a_pipeline_of_any_dtype_repeats_itself(deepspeed_ranks, tmp_path, stage, dtype):
    runs = [None, tmp_path / "baseline", tmp_path / "target"]
    plain, ends, _ = (
        record_pipeline(deepspeed_ranks, run, stage=stage, dtype=dtype) for run in runs
    )

    for rank in (0, 1):
        for name, weight in plain[rank]["weights"].items():
            assert weight.equal(ends[rank]["weights"][name]), f"capture changed {name}"
    assert verdict(*runs[1:]).verdict == "identical"
    assert not broken(runs[1])
    masters = last_events(runs[1], "optimizer", "master", "master")
    stages = [{f"{name}" for name in ends[rank]["weights"]} for rank in (0, 1)]
    assert len(masters) == len(stages[0] | stages[1])


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.long)])
def test_backwards_without_sync_are_calls_of_one_step(deepspeed_ranks, tmp_path, stage):
    plain = deepspeed_ranks.run(train_without_sync, Training(stage))
    runs = [tmp_path / "baseline", tmp_path / "target"]
    ends, _ = (
        deepspeed_ranks.run(train_without_sync, Training(stage, upguard=block(run))) for run in runs
    )

    for name, weight in plain[0]["weights"].items():
        assert weight.equal(ends[0]["weights"][name]), f"capture changed {name}"
    assert verdict(*runs).verdict == "identical"
    assert not broken(runs[0])
    batch = open_trace(runs[0]).read(0, 1)
    forwards = [
        int(batch.call[row])
        for row in range(len(batch))
        if (key := batch.key_of(row)).boundary == "3" and key.role == "output"
    ]
    assert forwards == [0, 1]


def moved() -> list[str]:
    import deepspeed

    from upguard_plugin.integrations.deepspeed.versions import PLACES, moved_places

    for place in PLACES:
        importlib.import_module(f"deepspeed.{place.module}")
    return moved_places(deepspeed.__version__)


def test_this_deepspeed_has_every_place_that_the_adapter_relies_on(deepspeed_ranks):
    assert deepspeed_ranks.run(moved) == [[], []]
