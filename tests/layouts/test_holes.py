"""A run whose own parts do not make up a tensor is not called identical to anything."""

from __future__ import annotations

from tests.layouts.split_runs import Mesh, split_run
from tests.memory_run import MemoryRun
from upguard_plugin.compare.runs import compare_runs

ONE = split_run(Mesh(), name="one")
WEIGHT, NORM = 0, 1  # rows


def test_a_part_that_a_rank_has_not_recorded_leaves_the_verdict_open():
    lacks = split_run(Mesh(tp=2), drops=[(1, 1, WEIGHT)], name="lacks")

    for pair in ((ONE, lacks), (lacks, ONE)):
        verdict = compare_runs(*pair)
        assert verdict.verdict == "incomparable"
        assert verdict.notes[0] == (
            "1 event not comparable: cannot merge fc.weight: no part holds element [4, 0]"
        )


def test_parts_that_two_ranks_hold_leave_the_verdict_open():
    halves, whole = split_run(Mesh(tp=2)), split_run(Mesh())
    ranks = {0: halves, 1: halves, 2: whole}  # one of them was set up for another layout
    mixed = MemoryRun(
        {rank: list(run.batches[rank % 2].values()) for rank, run in ranks.items()},
        layouts={rank: run.layout(rank % 2) for rank, run in ranks.items()},
    )

    verdict = compare_runs(ONE, mixed)

    assert verdict.verdict == "incomparable"
    assert verdict.notes[0] == (
        "20 events not comparable: cannot merge fc.weight: parts 0 and 2 overlap at element [0, 0]"
    )


def test_whole_tensors_and_replicas_that_only_some_ranks_recorded_are_identical():
    assert compare_runs(ONE, split_run(Mesh(tp=2))).verdict == "identical"
    alone = split_run(Mesh(tp=2), drops=[(1, 1, NORM)])
    assert compare_runs(ONE, alone).verdict == "identical"
