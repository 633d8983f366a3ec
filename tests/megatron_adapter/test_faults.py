"""Faults as found in Megatron: each is named where it is, and its clean twin is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bugs.training import compare, found
from tests.megatron_adapter.jobs import FAULT_STEP, Job, train
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

FEW = {"layers": 2, "num_microbatches": 2}
LAYOUTS = {
    job.name: job
    for job in (
        Job("tp2", tp=2, layers=2),
        Job("sp", tp=2, sequence_parallel=True, dtype="bf16", gated=True, num_steps=3, **FEW),
        Job("sp-experts", tp=2, ep=2, etp=1, experts=4, sequence_parallel=True, **FEW),
        Job("heads", tp=2, qk_layernorm=True, **FEW),
        Job("smoothed", tp=2, smoothing=True, **FEW),
        Job("pp2", pp=2, layers=2),
        Job("vpp2", pp=2, vpp=2),
        Job("tied", pp=2, untied=False, **FEW),
        Job("dp2", recompute="full", clip=0.01, **FEW),
        Job("pairs", recompute="pairs", **FEW),
        Job("distributed", distributed=True, **FEW),
        Job("ep2", ep=2, experts=4, **FEW),
        Job("fp16", tp=2, dtype="fp16", **FEW),
    )
}
_LAYER = "decoder.layers.1"
_FC1 = f"{_LAYER}.mlp.linear_fc1"
_SUM = "all_reduce[tp]"
_NORM = "decoder.final_layernorm"
_HEAD = "decoder.layers.0.self_attention.q_layernorm.weight.main_grad"
_TOKENS = "embedding.word_embeddings.weight"
_PROJ = f"{_LAYER}.self_attention.linear_proj"
_LOST = f"{_LAYER}.pre_mlp_layernorm.weight"  # has no gradient: the one behind it was cut off
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
# Fault -> the row of the catalogue of silent bugs, its layout, and where it must be found: step,
# phase, boundary, kind.
CASES = {
    "final_norm_unmarked": (
        "A2",
        "sp",
        (1, "grad_sync", f"{_SUM} {_NORM}.weight.main_grad", "collective"),
    ),
    "router_unmarked": (
        "A3",
        "sp-experts",
        (1, "grad_sync", f"{_SUM} {_LAYER}.mlp.router.weight.main_grad", "collective"),
    ),
    "head_norm_not_summed": ("A4", "heads", (1, "grad_sync", f"{_SUM} {_HEAD}", "collective")),
    "another_update_rule": ("A16", "tied", (1, "optimizer", _TOKENS, "optimizer")),
    "buffers_zeroed": ("A18", "dp2", (1, "accumulate", "output_layer.weight", "backward")),
    "embedding_not_summed": ("A", "tied", (1, "grad_sync", _EMBEDDING, "collective")),
    "smoothed_over_own_tokens": ("B1", "smoothed", (1, "forward", "(root)", "forward")),
    "logits_gathered": ("B2", "tp2", (1, "forward", "all_gather[tp]", "collective")),
    "loss_doubled": ("B9", "dp2", (1, "backward", "(root)", "backward")),
    "experts_doubled": ("B11", "ep2", (1, "grad_sync", _EXPERTS, "collective")),
    "clip_forgotten": ("B18", "dp2", (1, "clip", "embedding.word_embeddings.weight", "optimizer")),
    "norm_of_one_rank": ("B", "tp2", (1, "clip", "grad_norm", "optimizer")),
    "another_group": ("C1", "dp2", (1, "forward", "all_reduce[dp]", "collective")),
    # The partial sums of the look-up are first seen where they are added up.
    "vocabulary_offset": ("C3", "tp2", (1, "forward", "all_reduce[tp]", "forward")),
    "row_not_reduced": ("C", "tp2", (1, "forward", "all_reduce[tp]", "collective")),
    "local_layer_numbers": ("C7", "pp2", (0, "start", f"{_PROJ}.weight", "init")),
    "halves_mixed": ("C8", "sp", (0, "start", f"{_LAYER}.mlp.linear_fc1.weight", "init")),
    "states_swapped": ("C10", "ep2", (1, "start", f"{_PROJ}.weight", "optimizer")),
    "copy_reduced": ("C12", "tp2", (1, "backward", "output_layer", "backward")),
    "weights_of_other_tokens": ("C16", "ep2", (1, "forward", f"{_LAYER}.mlp.experts", "forward")),
    "weights_not_gathered": ("C", "distributed", (1, "param_sync", _WEIGHTS, "collective")),
    "first_input_again": ("D1", "pairs", (1, "recompute", _LAYER, "forward")),
    "recompute_differs": ("D2", "dp2", (1, "recompute", f"{_LAYER}.mlp.linear_fc1", "forward")),
    "detached_in_checkpoint": ("D3", "dp2", (1, "accumulate", _LOST, "backward")),
    "stale_reload": ("D6", "dp2", (1, "recompute", _LAYER, "forward")),
    "stale_gradient": ("D9", "dp2", (1, "accumulate", f"{_NORM}.bias", "backward")),
    "gradient_overwritten": ("D11", "tp2", (1, "accumulate", f"{_FC1}.weight", "backward")),
    "tracker_moved": ("D14", "sp", (1, "start", "rng.megatron.model-parallel-rng", "rng")),
    "batch_remembered": ("D16", "tp2", (1, "data", "input_ids", "data")),
    "moment_lost": ("D", "distributed", (1, "start", "output_layer.weight", "optimizer")),
    "master_stale": ("D", "sp", (2, "start", f"{_FC1}.weight", "optimizer")),
    "schedule_skips": ("D", "fp16", (1, "clip", "all_reduce[tp]", "collective")),
    "learning_rate_doubled": ("D", "tp2", (1, "start", "optimizer.group0.lr", "optimizer")),
    "router_noise": ("D", "ep2", (1, "start", f"{_LAYER}.mlp.router.weight", "optimizer")),
    "mask_overwritten": ("E15", "tp2", (1, "forward", _SOFTMAX, "forward")),
    "output_flipped": ("E20", "vpp2", (1, "forward", "decoder.layers.3.mlp.linear_fc2", "forward")),
    "weight_flipped": ("E", "tp2", (1, "start", f"{_FC1}.weight", "optimizer")),
}
FOUND_AT_THE_START = ("local_layer_numbers", "halves_mixed")  # as a checkpoint was read
SHORT = (
    "final_norm_unmarked", "experts_doubled", "copy_reduced", "first_input_again", "tracker_moved",
    "output_flipped", "weights_not_gathered",
)  # fmt: skip
FAULTS = [pytest.param(f, marks=() if f in SHORT else pytest.mark.long) for f in CASES]
_SHORT_LAYOUTS = {CASES[fault][1] for fault in SHORT}
CLEAN = [pytest.param(n, marks=() if n in _SHORT_LAYOUTS else pytest.mark.long) for n in LAYOUTS]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The folder of all runs: the layouts, their clean twins, and every fault that is asked for."""
    asked = {
        name
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
        for name in item.callspec.params.values()
    }
    folder = tmp_path_factory.mktemp("faults")
    faults = [fault for fault in CASES if fault in asked]
    needed = asked | {CASES[fault][1] for fault in faults}
    clean = [replace(job, watch=False) for name, job in LAYOUTS.items() if name in needed]
    twins = [replace(job, name=f"{job.name}-twin") for job in clean if job.name in asked]
    faulty = [
        replace(
            LAYOUTS[CASES[fault][1]],
            name=fault,
            fault=fault,
            fault_step=0 if fault in FOUND_AT_THE_START else FAULT_STEP,
            watch=False,
        )
        for fault in faults
    ]
    train([*clean, *twins, *faulty], folder)
    return folder / "runs"


@pytest.mark.parametrize("layout", CLEAN)
def test_a_clean_twin_is_identical(runs, layout):
    assert compare(runs / layout, runs / f"{layout}-twin")["verdict"] == "identical"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(runs, fault):
    _, layout, place = CASES[fault]

    verdict = compare(runs / layout, runs / fault)

    assert found(verdict, "step", "phase", "boundary", "kind") == place


@pytest.mark.parametrize(
    ("fault", "parameter"),
    [
        ("final_norm_unmarked", f"{_NORM}.weight"),
        pytest.param("router_unmarked", f"{_LAYER}.mlp.router.weight", marks=pytest.mark.long),
        pytest.param(
            "head_norm_not_summed", _HEAD.removesuffix(".main_grad"), marks=pytest.mark.long
        ),
    ],
)
def test_a_sum_that_is_left_out_shows_in_the_run_alone(runs, fault, parameter):
    """Ranks have other gradients of what they hold copies of."""
    broken = check_run(open_trace(runs / fault), Selection()).broken

    first = broken[0]
    found = (first.invariant, first.step, first.phase, first.boundary, first.role)
    assert found == ("replicas-agree", 1, "grad_sync", parameter, "main_grad")


def test_faults_cover_the_catalogue():
    rows = {row for row, _, _ in CASES.values() if len(row) > 1}

    assert len(rows) >= 20
    assert {row[0] for row in rows} >= set("ABCD")
