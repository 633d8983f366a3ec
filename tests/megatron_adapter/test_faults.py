"""Faults as found in Megatron: each is named where it is, and its clean twin is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bugs.training import compare, found
from tests.megatron_adapter.jobs import Job, train

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

LAYOUTS = {
    job.name: job
    for job in (
        Job("tp2", tp=2, layers=2),
        Job("tp2-sp", tp=2, sequence_parallel=True, dtype="bf16", layers=2, num_steps=3),
        Job("vpp2", pp=2, vpp=2),
        Job("pp2-tied", pp=2, untied=False, layers=2),
        Job("dp2", recompute="full", clip=0.01, layers=2),
        Job("dp2-distributed", distributed=True, layers=2),
        Job("ep2", ep=2, experts=4, layers=2),
        Job("fp16", tp=2, dtype="fp16", layers=2),
    )
}
_EXPERTS = (
    "all_reduce[EXPERT_DATA_PARALLEL_GROUP] 8 parameters from"
    " decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight to"
    " decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight.main_grad"
)
_WEIGHTS = (
    "all_gather[dp] 28 parameters from output_layer.weight to embedding.word_embeddings.weight"
)
_EMBEDDING = "all_reduce[pp] embedding.word_embeddings.weight.main_grad"
_SOFTMAX = "decoder.layers.0.self_attention.core_attention.scale_mask_softmax"
# Fault -> its layout, and where it must be found: step, phase, boundary, kind.
CASES = {
    "final_norm_unmarked": ("tp2-sp", (1, "grad_sync", "all_reduce[tp]", "collective")),
    "embedding_not_summed": ("pp2-tied", (1, "grad_sync", _EMBEDDING, "collective")),
    "weights_not_gathered": ("dp2-distributed", (1, "param_sync", _WEIGHTS, "collective")),
    "experts_doubled": ("ep2", (1, "grad_sync", _EXPERTS, "collective")),
    "output_flipped": ("vpp2", (1, "forward", "decoder.layers.3.mlp.linear_fc2", "forward")),
    "recompute_differs": ("dp2", (1, "recompute", "decoder.layers.1.mlp.linear_fc1", "forward")),
    "tracker_moved": ("tp2-sp", (1, "start", "rng.megatron.model-parallel-rng", "rng")),
    "schedule_skips": ("fp16", (1, "clip", "all_reduce[tp]", "collective")),
    # The partial sums of the look-up are first seen where they are added up.
    "vocabulary_offset": ("tp2", (1, "forward", "all_reduce[tp]", "forward")),
    "row_not_reduced": ("tp2", (1, "forward", "all_reduce[tp]", "collective")),
    "clip_forgotten": ("dp2", (1, "clip", "embedding.word_embeddings.weight", "optimizer")),
    "buffers_zeroed": ("dp2", (1, "accumulate", "output_layer.weight", "backward")),
    "learning_rate_doubled": ("tp2", (1, "start", "optimizer.group0.lr", "optimizer")),
    "weight_flipped": ("tp2", (1, "start", "decoder.layers.1.mlp.linear_fc1.weight", "optimizer")),
    "loss_doubled": ("dp2", (1, "backward", "(root)", "backward")),
    "moment_lost": ("dp2-distributed", (1, "start", "output_layer.weight", "optimizer")),
    "master_stale": ("tp2-sp", (2, "start", "decoder.layers.1.mlp.linear_fc1.weight", "optimizer")),
    "mask_overwritten": ("tp2", (1, "forward", _SOFTMAX, "forward")),
    "router_noise": ("ep2", (1, "start", "decoder.layers.1.mlp.router.weight", "optimizer")),
    "norm_of_one_rank": ("tp2", (1, "clip", "grad_norm", "optimizer")),
}
SHORT = tuple(CASES)[:8]
FAULTS = [pytest.param(f, marks=() if f in SHORT else pytest.mark.long) for f in CASES]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The folder of all runs: every layout, its clean twin, and every fault that is asked for."""
    items = [i for i in request.session.items if i.path == request.path]
    asked = {i.callspec.params["fault"] for i in items if "fault" in i.callspec.params}
    folder = tmp_path_factory.mktemp("faults")
    clean = list(LAYOUTS.values())
    twins = [replace(job, name=f"{job.name}-twin") for job in clean]
    faulty = [
        replace(LAYOUTS[layout], name=fault, fault=fault)
        for fault, (layout, _) in CASES.items()
        if fault in asked
    ]
    train([*clean, *twins, *faulty], folder)
    return folder / "runs"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_twin_is_identical(runs, layout):
    assert compare(runs / layout, runs / f"{layout}-twin")["verdict"] == "identical"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(runs, fault):
    layout, place = CASES[fault]

    verdict = compare(runs / layout, runs / fault)

    assert found(verdict, "step", "phase", "boundary", "kind") == place
