"""Faults of experts, Ulysses, AutoTP, an mpu and recompute, each named; its clean twin silent."""

from __future__ import annotations

import importlib.util

import deepspeed_parallel_faults as faults
import pytest
from deepspeed_parallel import train_case
from deepspeed_runs import answer, broken, verdict
from deepspeed_training import Training, block

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

# Fault -> case, and where it is found: step, micro-batch, phase, boundary, role, kind, ranks.
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts.2.0.weight"
FAULTS = {
    faults.norm_averages_the_experts: (
        "experts-2",
        "0 - clip grad_norm scalar optimizer 0 1",
    ),
    faults.expert_gradients_are_scaled_once_more: (
        "experts-2",
        f"0 - grad_sync {EXPERT} main_grad collective 1",  # the first of rank 1; of rank 0 likewise
    ),
    faults.heads_of_another_model: (
        "ulysses",
        "0 - forward attention output forward 0 1",
    ),
    faults.gradients_of_queries_are_zero: (
        "ulysses",
        "0 - backward all_to_all input backward 0 1",
    ),
    faults.partial_sums_are_not_added_up: (
        "autotp",
        "0 - forward all_reduce input collective 0 1",
    ),
    faults.replicated_gradients_are_clipped_on_rank_0_only: (
        "mpu",
        "0 - clip norm.weight main_grad optimizer 1",
    ),
    faults.recompute_gets_shifted_arguments: (
        "recompute",
        "0 - recompute second input forward 0 1",
    ),
}
# `upguard check` sees these in the faulty run alone.
BREAKS = {
    faults.partial_sums_are_not_added_up,
    faults.replicated_gradients_are_clipped_on_rank_0_only,
    faults.recompute_gets_shifted_arguments,
}
CONFIG = {"autotp": {"tensor_parallel": {"autotp_size": 2}}}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_and_its_clean_twin_is_silent(parallel_ranks, tmp_path, fault):
    case, expected = FAULTS[fault]
    for name in ("baseline", "clean", "faulty"):
        is_faulty = name == "faulty"
        training = Training(
            1, config=CONFIG.get(case, {}), fault=fault if is_faulty else None,
            upguard=block(tmp_path / name, program="faulty" if is_faulty else "clean"),
        )  # fmt: skip
        parallel_ranks.run(train_case, case, training)

    assert verdict(tmp_path / "baseline", tmp_path / "clean").verdict == "identical"
    found = verdict(tmp_path / "baseline", tmp_path / "faulty")
    assert found.first_divergence is not None, found.notes
    assert answer(found.first_divergence) == expected
    assert broken(tmp_path / "clean") == []
    assert bool(broken(tmp_path / "faulty")) is (fault in BREAKS)
