"""Real DeepSpeed on two CPU ranks, which import it once."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from dataclasses import replace
from itertools import product

import deepspeed_faults as faults
import pytest
from deepspeed_training import Training, block, train, train_pipeline
from memory_trace import hash_of
from ranks import Ranks

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2, timeout_s=240)  # the import of DeepSpeed alone may take long
    yield ranks
    ranks.close()


EVERYDAY = {(0, "fp32", 1), (1, "bf16", 2), (2, "fp32", 2), (3, "bf16", 1), (0, "bf16", 2)}
MATRIX = [
    pytest.param(
        *one, marks=[] if one in EVERYDAY else pytest.mark.long, id="-".join(map(str, one))
    )
    for one in product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2))
]
TRAINABLE = {"0.weight", "0.bias", "1.weight", "3.weight", "3.bias"}


def verdict(baseline, target):
    return compare_runs(open_trace(baseline), open_trace(target))


def broken(run):
    """What must hold inside one run and does not."""
    return check_run(open_trace(run), Selection()).broken


def last_events(run, phase, role, slot):
    """Of the last step: boundary -> (fingerprint, placement) of each rank that has it."""
    found = defaultdict(dict)
    trace = open_trace(run)
    for rank in trace.ranks:
        batch = trace.read(rank, trace.steps(rank)[-1].step)
        for row in range(len(batch)):
            key = batch.key_of(row)
            if (key.phase, key.role, key.slot) == (phase, role, slot):
                found[key.boundary][rank] = (batch.fingerprint(row), key.placement)
    return found


def merged(parts):
    """The fingerprint of the whole, from the parts of all ranks."""
    placements = [placement for _, placement in parts.values()]
    if not placements[0].sharded:
        assert len({fingerprint for fingerprint, _ in parts.values()}) == 1, "replicas differ"
        return next(iter(parts.values()))[0]
    check_cover(placements)
    whole, *others = [fingerprint for fingerprint, _ in parts.values()]
    for other in others:
        whole += other
    return whole


@pytest.mark.parametrize("stage, dtype, accumulation", MATRIX)
def test_twins_are_identical_and_everything_is_there(
    two_ranks, tmp_path, stage, dtype, accumulation
):
    plain = two_ranks.run(train, Training(stage, dtype, accumulation))
    runs = [tmp_path / "baseline", tmp_path / "target"]
    ends = [
        two_ranks.run(train, Training(stage, dtype, accumulation, upguard=block(run)))
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
    "zero1": Training(1),
    "zero2-bf16": Training(2, "bf16"),
    "zero3": Training(3),
    "bf16-optimizer": Training(1, "bf16", 2, config=FP32_GRADIENTS),
    "zero2-fp32-gradients": Training(2, "bf16", 2, config=FP32_GRADIENTS),
    "zero3-fp32-gradients": Training(3, "bf16", 2, config=FP32_GRADIENTS),
    "zero2-offload": Training(2, "bf16", 2, config=NO_CPU_ADAM, zero=OFFLOAD),
    "zero3-offload": Training(3, "bf16", 2, config=NO_CPU_ADAM, zero=OFFLOAD),
    "zero2-copies": Training(2, zero={"contiguous_gradients": False, "overlap_comm": True}),
    "zero1-round-robin": Training(1, zero={"round_robin_gradients": True}),
    "zero3-all-reduce": Training(3, zero={"reduce_scatter": False}),
    "zero3-small-groups": Training(3, "bf16", zero={"sub_group_size": 20}),
}
OFTEN = ("zero1", "zero2-bf16", "zero3")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[] if v in OFTEN else pytest.mark.long) for v in VARIANTS],
)
def test_merged_parts_are_what_deepspeed_itself_puts_together(two_ranks, tmp_path, variant):
    stage = VARIANTS[variant].stage
    plain = two_ranks.run(train, VARIANTS[variant])
    for name in ("run", "again"):
        training = replace(VARIANTS[variant], upguard=block(tmp_path / name))
        ends = two_ranks.run(train, training)

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
    phase = "optimizer" if stage == 3 else "param_sync"
    weights = last_events(tmp_path / "run", phase, "param", "value")
    assert set(weights) >= TRAINABLE
    for name, parts in weights.items():
        assert merged(parts).h == hash_of(ends[0]["weights"][name]), name


SMALL_BUCKETS = {"reduce_bucket_size": 28, "overlap_comm": True}
# Fault -> training, and where it is found: step, micro-batch, phase, boundary, role, kind, ranks.
FAULTS = {
    faults.bucket_overwritten_before_its_reduction: (
        Training(2, zero=SMALL_BUCKETS),
        "1 - grad_sync all_reduce bucket of 3.weight..3.bias input collective 1",
    ),
    faults.bucket_overwritten_after_its_reduction: (
        Training(2, zero=SMALL_BUCKETS),
        "1 - grad_sync 0.weight main_grad collective 0",
    ),
    faults.bucket_of_exactly_one_weight_is_never_reduced: (
        Training(3, zero={"reduce_bucket_size": 28}),
        "0 - grad_sync reduce_scatter 0.weight.grad input collective 0 1",
    ),
    faults.clip_on_one_rank_only: (
        Training(1),
        "0 - clip 0.bias main_grad optimizer 1",
    ),
    faults.norm_of_half_the_gradients: (
        Training(1),
        "0 - clip grad_norm scalar optimizer 0 1",
    ),
    faults.step_that_writes_nothing: (
        Training(1),
        "0 - optimizer 0.weight master optimizer 0",
    ),
    faults.state_loaded_without_its_step: (
        Training(3),
        "1 - start 0.weight optimizer_state optimizer 0 1",
    ),
    faults.state_loaded_at_a_wrong_offset: (
        Training(2),
        "1 - start 0.weight optimizer_state optimizer 0",
    ),
    faults.cast_of_a_frozen_weight: (
        Training(1),
        "0 - start 1.bias param init 0 1",
    ),
    faults.gradients_never_reduced: (
        Training(0),
        "0 - grad_sync all_reduce bucket of 0.weight..3.bias input collective 0 1",
    ),
    faults.weights_never_gathered: (
        Training(1),
        "0 - param_sync all_gather input collective 0 1",
    ),
    faults.learning_rate_of_a_group: (
        Training(1),
        "0 - start optimizer.group0.lr scalar optimizer 0 1",
    ),
    faults.one_accumulated_gradient_is_lost: (
        Training(1, accumulation=2),
        "0 1 accumulate 3.weight grad backward 0 1",
    ),
}


def answer(found) -> str:
    boundary = found.boundary.replace(found.boundary.partition("[")[2].partition("]")[0], "")
    boundary = boundary.replace("[]", "")
    microbatch = "-" if found.microbatch is None else found.microbatch
    parts = [found.step, microbatch, found.phase, boundary, found.role, found.kind, *found.ranks]
    return " ".join(map(str, parts))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_and_its_clean_twin_is_silent(two_ranks, tmp_path, fault):
    training, expected = FAULTS[fault]
    for name in ("baseline", "clean", "faulty"):
        two_ranks.run(
            train,
            replace(
                training,
                upguard=block(tmp_path / name, program="faulty" if name == "faulty" else "clean"),
                fault=fault if name == "faulty" else None,
            ),
        )

    assert verdict(tmp_path / "baseline", tmp_path / "clean").verdict == "identical"
    found = verdict(tmp_path / "baseline", tmp_path / "faulty")
    assert found.first_divergence is not None, found.notes
    assert answer(found.first_divergence) == expected


def test_a_step_that_overflows_is_marked_and_the_next_one_is_not(two_ranks, tmp_path):
    training = Training(
        1, "bf16", config={"bf16": {"check_grad_overflow": True}},
        upguard=block(tmp_path / "run"), fault=faults.gradient_that_overflows,
    )  # fmt: skip
    two_ranks.run(train, training)

    trace = open_trace(tmp_path / "run")
    assert [step.mark for step in trace.steps(0)] == ["skipped", None]
    found = []
    for step in (0, 1):
        batch = trace.read(0, step)
        rows = [r for r in range(len(batch)) if batch.key_of(r).boundary == "found_inf"]
        found += [batch.value[r] for r in rows]
    assert found == [1.0, 0.0]


PIPELINE = Training(0, accumulation=2)


def record_pipeline(two_ranks, run, fault=None, program="clean", **changes):
    training = Training(
        changes.get("stage", 0), changes.get("dtype", "fp32"), PIPELINE.accumulation,
        upguard=None if run is None else block(run, program=program), fault=fault,
    )  # fmt: skip
    return two_ranks.run(train_pipeline, training)


def test_a_pipeline_is_recorded_by_microbatch_receives_and_sends_too(two_ranks, tmp_path):
    plain = record_pipeline(two_ranks, None)
    ends = record_pipeline(two_ranks, tmp_path / "baseline")
    record_pipeline(two_ranks, tmp_path / "target")

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
    "fault, expected",
    [
        (
            faults.tied_gradients_never_summed,
            "0 - grad_sync all_reduce tied_modules.token.weight.grad input collective 0 1",
        ),
        (
            faults.one_activation_is_sent_changed,
            "0 1 forward send input forward 0",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_planted_in_a_pipeline_is_named(two_ranks, tmp_path, fault, expected):
    record_pipeline(two_ranks, tmp_path / "baseline")
    record_pipeline(two_ranks, tmp_path / "faulty", fault, "faulty")

    found = verdict(tmp_path / "baseline", tmp_path / "faulty")
    assert answer(found.first_divergence) == expected
