"""Real Megatron-Core in the layouts that two processes can have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.bugs.training import compare
from tests.megatron_adapter.jobs import Job, train
from tests.megatron_adapter.matrix import LAYOUTS, pairwise, whole_matrix
from tests.megatron_adapter.merged import activations, events, first_outputs, states, whole
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

SPECIAL = [
    Job("evaluated", pp=2, evaluate=True, layers=2),
    Job("tied", pp=2, untied=False, layers=2),
    Job("fp16", tp=2, dtype="fp16", layers=2),
    Job("explicit", tp=2, explicit_groups=True, layers=2),
    Job("operators", tp=2, level="op", layers=1),
    Job("operators-overlapped", distributed=True, overlap=True, level="op", layers=1),
    Job("operators-sequence", tp=2, sequence_parallel=True, level="op", layers=1),
    Job("latent", tp=2, latent=True, sequence_parallel=True, layers=1),
    Job("further", pp=2, further_tokens=1, layers=2),
    Job("experts", tp=2, experts=4, sequence_parallel=True, layers=1),
    Job("experts-apart", tp=2, ep=2, etp=1, experts=4, sequence_parallel=True, layers=1),
    Job("deferred", pp=2, fused=True, deferred=True, layers=2),
    Job("ramp", pp=2, ramp=(2, 4), layers=2),
    Job("overlapped-plain", overlap=True, layers=2),  # without a distributed optimizer
    Job("heads", tp=2, qk_layernorm=True, layers=1),
    Job("pairs", recompute="pairs", layers=2),
    Job("block", recompute="block", layers=2),
]
JOBS = [*SPECIAL, *whole_matrix(LAYOUTS)]
# The rest is run by `make test-long`.
SHORT = (
    "evaluated", "latent", "further", "experts-apart", "deferred", "operators",
    "operators-overlapped", *pairwise(LAYOUTS),
)  # fmt: skip
LONG = {job.name: pytest.mark.long for job in JOBS if job.name not in SHORT}
AT_LEVEL_OP = [job.name for job in SPECIAL if job.level == "op"]
NAMES = [pytest.param(job.name, marks=LONG.get(job.name, ())) for job in JOBS]
WITH_THE_WEIGHTS_OF_TP2 = {"pp2-full-fp32", "vpp2-selective-fp32", "ramp", "explicit"}
CUT_IN_PLACE = "fp16"  # unscaling changes the gradients that were recorded before it


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """The folder, and by job what each rank said: every job, its twin, and without capture.

    Only of the jobs that the selected tests ask for.
    """
    asked = {
        name
        for item in request.session.items
        if item.path == request.path
        for name in (item.callspec.params.values() if hasattr(item, "callspec") else SHORT)
    }
    if asked & WITH_THE_WEIGHTS_OF_TP2:
        asked.add("tp2-none-fp32")
    jobs = [job for job in JOBS if job.name in asked]
    outputs = [
        replace(job, name=f"{job.name}-outputs", roles="output", watch=False)
        for job in jobs
        if job.level == "op"
    ]
    folder = tmp_path_factory.mktemp("layouts")
    twins = [replace(job, name=f"{job.name}-twin") for job in jobs]
    plain = [replace(job, name=f"{job.name}-plain", level=None, watch=False) for job in jobs]
    return folder, train([*jobs, *twins, *plain, *outputs], folder)


@pytest.mark.parametrize("name", NAMES)
def test_capture_leaves_every_weight_as_it_is_without(ran, name):
    _, said = ran

    for with_capture, without in zip(said[name], said[f"{name}-plain"], strict=True):
        assert with_capture["weights"] == without["weights"]
        assert with_capture["steps"] == without["steps"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG.get(n, ())) for n in AT_LEVEL_OP])
def test_capture_of_outputs_alone_leaves_every_weight_as_it_is_without(ran, name):
    folder, said = ran

    for rank, without in enumerate(said[f"{name}-plain"]):
        assert said[f"{name}-outputs"][rank]["weights"] == without["weights"]
        runs = (open_trace(folder / "runs" / run) for run in (f"{name}-outputs", name))
        outputs, whole_step = (len(run.read(rank, 1)) for run in runs)
        assert 0 < outputs < whole_step


@pytest.mark.parametrize("name", NAMES)
def test_the_same_training_twice_is_identical(ran, name):
    folder, _ = ran

    verdict = compare(folder / "runs" / name, folder / "runs" / f"{name}-twin")

    assert verdict["verdict"] == "identical"
    assert verdict["coverage"]["compared"] > 900


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_state_add_up_to_the_whole_tensors(ran, name):
    folder, said = ran
    found = states(folder / "runs" / name, step=1)
    wanted = said[name][0]["end"]

    assert set(wanted) >= {"param", "main_grad", "exp_avg", "exp_avg_sq"}
    for kind, tensors in wanted.items():
        assert {n for k, n in found if k == kind} == set(tensors)
        if (kind, name) == ("main_grad", CUT_IN_PLACE):
            continue
        for tensor, facts in tensors.items():
            assert _facts(whole(found[kind, tensor])) == facts, f"{kind} {tensor}"


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_activations_add_up_to_the_whole_tensors(ran, name):
    folder, said = ran
    found = first_outputs(folder / "runs" / name)

    wanted = said[name][0]["activations"]
    if name == "further":  # two stages have an embedding, one of them for the further tokens
        del wanted["embedding"]
    for module, facts in wanted.items():
        assert found[module] == facts, module
    assert len(found) >= len(wanted) > 8


def _facts(merged):
    return [merged.h, merged.s, merged.dtype, list(merged.shape)]


@pytest.mark.parametrize("name", NAMES)
def test_every_event_of_a_micro_batch_says_which_it_is(ran, name):
    folder, _ = ran
    job = next(job for job in JOBS if job.name == name)
    seen = defaultdict(set)
    for event in events(folder / "runs" / name):
        is_operator = (event.key.operator or "").startswith("aten.")  # the schedule has its own
        if event.key.group is None and not is_operator:
            seen[event.step, event.key.phase].add(event.microbatch)

    for step in range(job.num_steps):
        numbers = set(range(job.microbatches_of(step)))
        for phase in ("forward", "backward", "accumulate"):
            assert seen[step, phase] == numbers
        assert seen[step, "start"] == seen[step, "optimizer"] == {-1}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_where_the_adapter_looks_for_it(ran, name):
    _, said = ran

    for rank in said[name]:
        assert rank["moved"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_guard_leaves_nothing_behind(ran, name):
    _, said = ran

    for rank in said[name]:
        assert rank["left"] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_invariant_is_broken(ran, name):
    folder, _ = ran

    report = check_run(open_trace(folder / "runs" / name), Selection())

    assert [one.explanation for one in report.broken] == []
    assert [one for one in report.suspects if one.invariant == "outputs-awaited"] == []
    assert report.checked["collectives-match"] > 10
    assert ("outputs-awaited" in report.checked) == name.startswith("operators")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=LONG.get(n, ())) for n in sorted(WITH_THE_WEIGHTS_OF_TP2)]
)
def test_layouts_begin_with_the_same_weights_under_the_same_names(ran, name):
    folder, _ = ran
    merged = {}
    for layout in ("tp2-none-fp32", name):
        found = states(folder / "runs" / layout, step=0, phase="start")
        merged[layout] = {n: whole(parts) for (kind, n), parts in found.items() if kind == "param"}

    more = {n for n in merged[name] if n.startswith(("decoder.layers.2.", "decoder.layers.3."))}
    assert merged["tp2-none-fp32"] == {n: f for n, f in merged[name].items() if n not in more}
    assert bool(more) == (name == "vpp2-selective-fp32")


def test_the_backward_of_a_module_belongs_to_the_micro_batch_of_its_forward(ran):
    folder, _ = ran
    seen = defaultdict(list)
    for event in events(folder / "runs" / "vpp2-none-bf16"):
        key = event.key
        is_output = key.role in ("output", "grad_output") and key.slot == "out.0"
        if key.boundary.endswith("mlp.linear_fc2") and is_output and key.phase != "recompute":
            seen[event.rank, event.step, key.boundary, key.phase].append(event.microbatch)

    assert len(seen) == 2 * 4 * 2  # steps, layers, phases
    for numbers in seen.values():
        assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["vpp2-none-bf16", "pp2-full-fp32"])
def test_what_a_recompute_repeats_is_told_from_forward(ran, name):
    folder, _ = ran

    phases = {e.key.phase for e in events(folder / "runs" / name) if "linear_fc1" in e.key.boundary}

    assert ("recompute" in phases) == (name == "pp2-full-fp32")


@pytest.mark.long
def test_explicit_groups_give_the_layout_of_the_global_ones(ran):
    folder, _ = ran
    traces = [open_trace(folder / "runs" / name) for name in ("tp2-none-fp32", "explicit")]

    for rank in (0, 1):
        assert traces[0].layout(rank) == traces[1].layout(rank)
        axes = {(axis.mesh, axis.name): axis.size for axis in traces[0].layout(rank).axes}
        assert axes["dense", "tp"] == 2
        assert set(axes.values()) == {1, 2}


def test_layers_are_numbered_over_stages_and_chunks(ran):
    folder, _ = ran
    layers = defaultdict(set)
    for event in events(folder / "runs" / "vpp2-none-bf16"):
        parts = event.key.boundary.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layers[event.rank].add(int(parts[2]))

    assert layers == {0: {0, 2}, 1: {1, 3}}


def test_evaluation_is_told_from_training(ran):
    folder, _ = ran
    phases = {
        event.key.phase
        for event in events(folder / "runs" / "evaluated")
        if event.key.boundary == "decoder.layers.0.mlp" and event.key.role == "input"
    }

    assert phases == {"eval", "forward"}


def test_a_gradient_added_by_a_kernel_is_seen_in_its_accumulator(ran):
    folder, _ = ran
    seen = defaultdict(set)
    for event in events(folder / "runs" / "deferred"):
        if event.key.phase == "accumulate" and event.key.boundary.endswith("linear_fc1.weight"):
            seen[event.key.role, event.key.moment].add(event.microbatch)

    assert seen == {("main_grad", "after"): {0, 1, 2, 3}}


def test_a_gradient_that_is_deferred_is_there_when_all_are_final(ran):
    folder, _ = ran
    is_empty = defaultdict(set)
    for event in events(folder / "runs" / "deferred"):
        if event.key.boundary == "output_layer.weight" and event.key.role == "main_grad":
            is_empty[event.step, event.key.phase].add(event.h == 0)

    for step in range(2):
        assert is_empty[step, "accumulate"] == {True}
        assert is_empty[step, "grad_sync"] == {False}


def test_every_expert_has_its_tokens_placed_where_ranks_share_their_samples(ran):
    folder, _ = ran
    placed = defaultdict(set)
    for place, parts in activations(folder / "runs" / "experts-apart").items():
        _, _, _, boundary, phase, role, slot = place
        if phase == "forward" and role == "input" and slot == "args.0":
            placed[boundary].add(all(part.key.placement is not None for part in parts))

    inside = "decoder.layers.0.mlp.experts"
    for expert in range(4):
        assert placed[f"{inside}.local_experts.{expert}"] == {True}
    assert placed[inside] == {False}  # all of a rank's experts: how many tokens others have is open
