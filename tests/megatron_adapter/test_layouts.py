"""Real Megatron-Core in the layouts that two processes can have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.bugs.training import compare
from tests.megatron_adapter.jobs import Job, train
from tests.megatron_adapter.merged import events, states, whole
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

JOBS = [
    Job("tp2", tp=2),
    Job("tp2-sp", tp=2, sequence_parallel=True, gated=True, query_groups=2, dtype="bf16"),
    Job("pp2", pp=2, evaluate=True),
    Job("vpp2", pp=2, vpp=2, dtype="bf16", recompute=True),
    Job("pp2-tied", pp=2, untied=False),
    Job("dp2", recompute=True),
    Job("dp2-distributed", distributed=True),
    Job("dp2-overlapped", distributed=True, overlap=True, dtype="bf16"),
    Job("ep2", ep=2, experts=4),
    Job("fp16", tp=2, dtype="fp16"),
    Job("operators", tp=2, level="op", layers=2),
]
SHORT = ("tp2", "tp2-sp", "pp2", "vpp2", "dp2-overlapped", "ep2")
NAMES = [
    pytest.param(job.name, marks=() if job.name in SHORT else pytest.mark.long) for job in JOBS
]
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
    jobs = [job for job in JOBS if job.name in {*asked, "tp2"}]
    folder = tmp_path_factory.mktemp("layouts")
    twins = [replace(job, name=f"{job.name}-twin") for job in jobs]
    plain = [replace(job, name=f"{job.name}-plain", level=None) for job in jobs]
    return folder, train([*jobs, *twins, *plain], folder)


@pytest.mark.parametrize("name", NAMES)
def test_capture_leaves_every_weight_as_it_is_without(ran, name):
    _, said = ran

    for with_capture, without in zip(said[name], said[f"{name}-plain"], strict=True):
        assert with_capture["weights"] == without["weights"]
        assert with_capture["steps"] == without["steps"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_training_twice_is_identical(ran, name):
    folder, _ = ran

    verdict = compare(folder / "runs" / name, folder / "runs" / f"{name}-twin")

    assert verdict["verdict"] == "identical"
    assert verdict["coverage"]["compared"] > 3000


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
        for tensor, (h, s, dtype, shape) in tensors.items():
            merged = whole(found[kind, tensor])
            assert (merged.h, merged.s) == (h, s), f"{kind} {tensor}"
            assert (merged.dtype, list(merged.shape)) == (dtype, shape)


@pytest.mark.parametrize("name", ["pp2", "vpp2", pytest.param("dp2", marks=pytest.mark.long)])
def test_layouts_begin_with_the_same_weights_under_the_same_names(ran, name):
    folder, _ = ran
    merged = {}
    for layout in ("tp2", name):
        found = states(folder / "runs" / layout, step=0, phase="start")
        merged[layout] = {n: whole(parts) for (kind, n), parts in found.items() if kind == "param"}

    shapes = {n: f.shape for n, f in merged[name].items()}
    assert shapes == {n: f.shape for n, f in merged["tp2"].items()}
    if name != "vpp2":  # that one is in bf16
        assert merged[name] == merged["tp2"]


@pytest.mark.parametrize("name", NAMES)
def test_every_event_of_a_micro_batch_says_which_it_is(ran, name):
    folder, _ = ran
    seen = defaultdict(set)
    for event in events(folder / "runs" / name):
        is_operator = (event.key.operator or "").startswith("aten.")  # the schedule has its own
        if event.key.group is None and not is_operator:
            seen[event.key.phase].add(event.microbatch)

    assert seen["forward"] == seen["backward"] == seen["accumulate"] == {0, 1, 2, 3}
    assert seen["start"] == seen["optimizer"] == {-1}


def test_the_backward_of_a_module_belongs_to_the_micro_batch_of_its_forward(ran):
    folder, _ = ran
    seen = defaultdict(list)
    for event in events(folder / "runs" / "vpp2"):
        key = event.key
        is_output = key.role in ("output", "grad_output") and key.slot == "out.0"
        if key.boundary.endswith("mlp.linear_fc2") and is_output and key.phase != "recompute":
            seen[event.rank, event.step, key.boundary, key.phase].append(event.microbatch)

    assert len(seen) == 2 * 4 * 2  # steps, layers, phases
    for numbers in seen.values():
        assert numbers == [0, 1, 2, 3]


def test_layers_are_numbered_over_stages_and_chunks(ran):
    folder, _ = ran
    layers = defaultdict(set)
    for event in events(folder / "runs" / "vpp2"):
        parts = event.key.boundary.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layers[event.rank].add(int(parts[2]))

    assert layers == {0: {0, 2}, 1: {1, 3}}


def test_evaluation_is_told_from_training(ran):
    folder, _ = ran
    phases = {
        event.key.phase
        for event in events(folder / "runs" / "pp2")
        if event.key.boundary == "decoder.layers.0.mlp" and event.key.role == "input"
    }

    assert phases == {"eval", "forward"}


@pytest.mark.parametrize("name", ["tp2", "tp2-sp"])
def test_parts_of_activations_on_tensor_parallel_ranks_add_up(ran, name):
    """Replicas are equal, and parts cover their whole without a gap: `whole` refuses otherwise."""
    folder, _ = ran
    found = defaultdict(list)
    for event in events(folder / "runs" / name):
        key = event.key
        roles = ("input", "output", "grad_input", "grad_output")
        if key.role in roles and key.group is None and key.placement is not None:
            place = (event.step, event.microbatch, event.call, key.boundary, key.phase)
            found[(*place, key.role, key.slot)].append(event)

    shapes = set()
    for parts in found.values():
        assert len(parts) == 2
        shapes.add(whole(parts).shape)
    assert {(16, 2, 32), (16, 2, 4, 8), (16, 2, 64), (2, 4, 16, 16)} <= shapes


@pytest.mark.parametrize("name", NAMES)
def test_no_invariant_is_broken(ran, name):
    folder, _ = ran

    report = check_run(open_trace(folder / "runs" / name), Selection())

    assert [one.explanation for one in report.broken] == []
    assert report.checked["collectives-match"] > 30
