"""Real Megatron-Core on four processes: layouts of more than one axis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bugs.training import compare, found
from tests.megatron_adapter.jobs import Job, train
from tests.megatron_adapter.matrix import ON_FOUR_RANKS, whole_matrix
from tests.megatron_adapter.merged import first_outputs, states, whole

pytestmark = [pytest.mark.megatron, pytest.mark.long]
pytest.importorskip("megatron.core")

_ROUTER = "all_reduce[tp] decoder.layers.1.mlp.router.weight.main_grad"
_BUCKET = (
    "all_reduce[dp] 13 parameters from decoder.layers.0.mlp.linear_fc2.bias to"
    " embedding.word_embeddings.weight.main_grad"
)
JOBS = {
    job.name: job
    for job in (
        *whole_matrix(ON_FOUR_RANKS),
        Job("tied", pp=2, untied=False, layers=2),
        Job("tp2-dp2", tp=2, sequence_parallel=True, distributed=True, overlap=True, gated=True),
        # Gloo cannot gather the uneven parts that experts split over etp would have.
        Job(
            "tp2-ep2",
            tp=2,
            ep=2,
            etp=1,
            experts=4,
            sequence_parallel=True,
            distributed=True,
            layers=2,
        ),
    )
}
# Rows A3 and A15 of the catalogue of silent bugs.
CASES = {
    "router_unmarked": ("tp2-ep2", (1, "grad_sync", _ROUTER, "collective")),
    "embedding_summed_too_early": ("tied", (1, "grad_sync", _BUCKET, "collective")),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder, and by job what each rank said."""
    folder = tmp_path_factory.mktemp("four")
    twins = [replace(job, name=f"{job.name}-twin") for job in JOBS.values()]
    plain = [replace(job, name=f"{job.name}-plain", level=None) for job in JOBS.values()]
    faults = [
        replace(JOBS[layout], name=fault, fault=fault) for fault, (layout, _) in CASES.items()
    ]
    return folder, train([*JOBS.values(), *twins, *plain, *faults], folder, num_ranks=4)


@pytest.mark.parametrize("name", JOBS)
def test_capture_leaves_every_weight_as_it_is_without(ran, name):
    _, said = ran

    for with_capture, without in zip(said[name], said[f"{name}-plain"], strict=True):
        assert with_capture["weights"] == without["weights"]


@pytest.mark.parametrize("name", JOBS)
def test_the_same_training_twice_is_identical(ran, name):
    folder, _ = ran

    verdict = compare(folder / "runs" / name, folder / "runs" / f"{name}-twin")

    assert verdict["verdict"] == "identical"


@pytest.mark.parametrize("name", JOBS)
def test_parts_of_state_add_up_to_the_whole_tensors(ran, name):
    folder, said = ran
    seen = states(folder / "runs" / name, step=1)

    for kind, tensors in said[name][0]["end"].items():
        for tensor, (h, s, dtype, shape) in tensors.items():
            merged = whole(seen[kind, tensor])
            assert (merged.h, merged.s) == (h, s), f"{kind} {tensor}"
            assert (merged.dtype, list(merged.shape)) == (dtype, shape)


@pytest.mark.parametrize("name", JOBS)
def test_parts_of_activations_add_up_to_the_whole_tensors(ran, name):
    folder, said = ran
    found = first_outputs(folder / "runs" / name)

    wanted = said[name][0]["activations"]
    assert {module: found[module] for module in wanted} == wanted


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_is_named(ran, fault):
    folder, _ = ran
    layout, place = CASES[fault]

    verdict = compare(folder / "runs" / layout, folder / "runs" / fault)

    assert found(verdict, "step", "phase", "boundary", "kind") == place
