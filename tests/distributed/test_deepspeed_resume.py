"""A DeepSpeed training that goes on from its checkpoint, against one that was never interrupted."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed_runs import answer, broken, verdict
from deepspeed_training import Training, block, make_engine, run_steps
from torch import distributed as dist

from upguard_plugin.compare.ignoring import IgnoreRule
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

# ZeRO 3 learns in the first step of an engine which weights to gather together.
GATHERS = (IgnoreRule(("all_gather[[]*",), (), "ZeRO 3 gathers weights otherwise in a first step"),)
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def train_on(training, folder):
    """Two steps, a checkpoint, two steps."""
    engine = make_engine(training)
    try:
        run_steps(engine, training)
        engine.save_checkpoint(folder, tag="here")
        run_steps(engine, replace(training, done=2))
    finally:
        engine.destroy()


def resume(training, folder):
    """The checkpoint, and the two steps behind it."""
    engine = make_engine(training)
    try:
        path, _ = engine.load_checkpoint(folder, tag="here")
        assert path is not None
        if training.fault is not None:
            training.fault(engine)
        run_steps(engine, replace(training, done=2))
    finally:
        engine.destroy()


def make_universal(folder, target):
    """DeepSpeed's own conversion, on the first rank."""
    if dist.get_rank() == 0:
        from deepspeed.checkpoint import ds_to_universal

        names = "input_folder", "output_folder", "num_extract_workers", "num_merge_workers"
        given = dict(zip(names, (f"{folder}/here", f"{target}/here", 1, 1), strict=True))
        flags = {"strict": True, "keep_temp_folder": False, "inject_missing_state": True}
        ds_to_universal.main(SimpleNamespace(**given, **flags))
    dist.barrier()


def _states(engine):
    flats = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    flats = engine.optimizer.single_partition_of_fp32_groups if flats is None else flats
    return [(flat, engine.basic_optimizer.state[flat]) for flat in flats]


def without_the_step(engine):
    """Moments are there and the step counter is not: wrong bias correction."""
    for _, state in _states(engine):
        state["step"].zero_()


def masters_from_the_weights(engine):
    """fp32 masters are made anew of bf16 weights: what they had beyond bf16 is lost."""
    for flat, _ in _states(engine):
        flat.data.copy_(flat.data.to(torch.bfloat16))


def moments_of_another_weight(engine):
    """Moments are read from a wrong place in the file."""
    for _, state in _states(engine):
        state["exp_avg"].copy_(state["exp_avg"].roll(1))


def record(ranks, tmp_path, training):
    """The uninterrupted run; its checkpoint lies beside it."""
    upguard = block(tmp_path / "baseline", program="clean")
    ranks.run(train_on, replace(training, upguard=upguard), str(tmp_path / "saved"))


def record_resumed(ranks, tmp_path, training, name, folder="saved", fault=None):
    upguard = block(tmp_path / name, program="faulty" if fault else "clean")
    training = replace(training, upguard=upguard, fault=fault)
    ranks.run(resume, training, str(tmp_path / folder))


@pytest.mark.parametrize(
    "stage, dtype",
    [(1, "bf16"), (3, "fp32"), pytest.param(2, "fp32", marks=pytest.mark.long)],
)
def test_a_resumed_run_is_the_rest_of_one_that_went_on(deepspeed_ranks, tmp_path, stage, dtype):
    training = Training(stage, dtype)
    record(deepspeed_ranks, tmp_path, training)
    record_resumed(deepspeed_ranks, tmp_path, training, "resumed")

    runs = [open_trace(tmp_path / name) for name in ("baseline", "resumed")]
    found = compare_runs(*runs, Selection(ignore=GATHERS if stage == 3 else ()))

    assert found.first_divergence is None, found.first_divergence
    resumed = runs[1]
    assert [step.iteration for step in resumed.steps(0)] == [2, 3]
    phases = {key.phase for key in open_trace(tmp_path / "baseline").read(0, 2).keys}
    assert "checkpoint" in phases | {k.phase for k in resumed.read(0, 0).keys}
    assert broken(tmp_path / "baseline") == broken(tmp_path / "resumed") == []


@pytest.mark.parametrize(
    "fault, training, expected",
    [
        (
            without_the_step,
            Training(1, "bf16"),
            "start 0.weight optimizer_state optimizer 0",
        ),
        (
            masters_from_the_weights,
            Training(2, "bf16"),
            "start 0.weight master optimizer 0",
        ),
        (
            moments_of_another_weight,
            Training(3),
            "start 0.weight optimizer_state optimizer 0 1",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_a_resume_is_named(deepspeed_ranks, tmp_path, fault, training, expected):
    record(deepspeed_ranks, tmp_path, training)
    record_resumed(deepspeed_ranks, tmp_path, training, "faulty", fault=fault)

    found = verdict(tmp_path / "baseline", tmp_path / "faulty").first_divergence

    assert answer(found).split(" ", 2)[2] == expected


@pytest.mark.long
@pytest.mark.parametrize("fault, expected", [
    (None, None),
    (moments_of_another_weight, "start 0.weight optimizer_state optimizer 0"),
])  # fmt: skip
def test_a_universal_checkpoint_brings_back_every_state(deepspeed_ranks, tmp_path, fault, expected):
    training = Training(1, "bf16")
    record(deepspeed_ranks, tmp_path, training)
    deepspeed_ranks.run(make_universal, str(tmp_path / "saved"), str(tmp_path / "universal"))
    universal = replace(training, config=UNIVERSAL)
    record_resumed(deepspeed_ranks, tmp_path, universal, "resumed", "universal", fault)

    found = verdict(tmp_path / "baseline", tmp_path / "resumed").first_divergence

    assert (found and answer(found).split(" ", 2)[2]) == expected
