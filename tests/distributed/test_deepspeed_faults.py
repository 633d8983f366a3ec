"""Faults of DeepSpeed trainings, planted in real engines: each is named, its clean twin silent."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import deepspeed_faults as faults
import pytest
from deepspeed_runs import answer, broken, verdict
from deepspeed_training import Training, block, record_pipeline, train
from ranks import Ranks

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

SMALL_BUCKETS = {"reduce_bucket_size": 28, "overlap_comm": True}
# Fault -> training, and where it is found: step, micro-batch, phase, boundary, role, kind, ranks.
FAULTS = {
    faults.bucket_overwritten_before_its_reduction: (
        Training(2, zero=SMALL_BUCKETS),
        # In which order they fill the bucket is the autograd engine's.
        (
            "1 - grad_sync all_reduce bucket of 3.weight..3.bias input collective 1",
            "1 - grad_sync all_reduce bucket of 3.bias..3.weight input collective 1",
        ),
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
    faults.weight_decay_is_ahead: (
        Training(1),
        "0 - start 0.weight master optimizer 0",
    ),
    faults.random_state_of_another_generator: (
        Training(3),
        "1 - start rng.torch_cpu rng rng 0 1",
    ),
    faults.step_counter_of_one_weight_runs_ahead: (
        Training(0),
        "1 - optimizer 3.weight optimizer_state optimizer 0 1",
    ),
    faults.step_is_skipped_without_an_overflow: (
        Training(2, "bf16", config={"bf16": {"check_grad_overflow": True}}),
        "1 - clip all_reduce input collective 0 1",  # of the norm, which nobody asks for
    ),
    faults.one_accumulated_gradient_is_lost: (
        Training(1, accumulation=2),
        "0 1 accumulate 3.weight grad backward 0 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_and_its_clean_twin_is_silent(deepspeed_ranks, tmp_path, fault):
    training, expected = FAULTS[fault]
    for name in ("baseline", "clean", "faulty"):
        deepspeed_ranks.run(
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
    assert answer(found.first_divergence) in (
        (expected,) if isinstance(expected, str) else expected
    )


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
def test_a_fault_planted_in_a_pipeline_is_named(deepspeed_ranks, tmp_path, fault, expected):
    record_pipeline(deepspeed_ranks, tmp_path / "baseline")
    record_pipeline(deepspeed_ranks, tmp_path / "faulty", fault, "faulty")

    found = verdict(tmp_path / "baseline", tmp_path / "faulty")
    assert answer(found.first_divergence) in (
        (expected,) if isinstance(expected, str) else expected
    )


@pytest.mark.long
def test_two_replicas_of_a_pipeline_that_are_never_reduced_are_named(tmp_path):
    ranks = Ranks(4, timeout_s=400)
    try:
        for name in ("baseline", "clean", "faulty"):
            fault = faults.pipeline_reduces_nothing if name == "faulty" else None
            record_pipeline(ranks, tmp_path / name, fault, "faulty" if fault else "clean")
    finally:
        ranks.close()

    assert verdict(tmp_path / "baseline", tmp_path / "clean").verdict == "identical"
    assert not broken(tmp_path / "clean")
    found = verdict(tmp_path / "baseline", tmp_path / "faulty").first_divergence
    bucket = "bucket of tied_modules.token.weight..3.bias"  # of the last stage; the first likewise
    assert answer(found) == f"0 - grad_sync all_reduce {bucket} input collective 2 3"
