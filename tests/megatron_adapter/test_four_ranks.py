"""Real Megatron-Core on four processes: layouts of more than one axis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bugs.training import compare, found
from tests.megatron_adapter.jobs import Job, train
from tests.megatron_adapter.merged import states, whole

pytestmark = [pytest.mark.megatron, pytest.mark.long]
pytest.importorskip("megatron.core")

JOBS = {
    job.name: job
    for job in (
        Job("tp2-pp2", tp=2, pp=2),
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


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder, and by job what each rank said."""
    folder = tmp_path_factory.mktemp("four")
    twins = [replace(job, name=f"{job.name}-twin") for job in JOBS.values()]
    fault = replace(JOBS["tp2-ep2"], name="router_unmarked", fault="router_unmarked")
    return folder, train([*JOBS.values(), *twins, fault], folder, num_ranks=4)


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


def test_a_router_whose_gradient_is_not_summed_is_named(ran):
    folder, _ = ran

    verdict = compare(folder / "runs" / "tp2-ep2", folder / "runs" / "router_unmarked")

    place = (1, "grad_sync", "all_reduce[tp]", "collective")
    assert found(verdict, "step", "phase", "boundary", "kind") == place
