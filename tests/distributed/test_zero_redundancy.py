"""torch's ZeroRedundancyOptimizer on two ranks."""

from __future__ import annotations

from collections import defaultdict

import pytest
from zero_redundancy_training import STEPS, overlapped, saves_and_loads, train

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace


def check(run):
    return check_run(open_trace(run), Selection())


@pytest.mark.parametrize("views", [False, True])
def test_twins_are_identical_unbroken_and_train_as_without(two_ranks, tmp_path, views):
    bare = two_ranks.run(train, None, False, views)
    for name in ("baseline", "target"):
        assert two_ranks.run(train, str(tmp_path / name), False, views) == bare

    baseline, target = (open_trace(tmp_path / name) for name in ("baseline", "target"))

    assert compare_runs(baseline, target).verdict == "identical"
    report = check(tmp_path / "baseline")
    assert ([one.explanation for one in report.broken], report.suspects) == ([], [])
    assert report.checked["replicas-agree"] > 0


def test_each_state_lies_on_one_rank_and_weights_on_both(two_ranks, tmp_path):
    two_ranks.run(train, str(tmp_path / "run"))
    trace, held = open_trace(tmp_path / "run"), defaultdict(set)
    for rank in trace.ranks:
        batch = trace.read(rank, STEPS - 1)
        for row in range(len(batch)):
            key = batch.key_of(row)
            if key.phase == "start" and key.role in ("param", "optimizer_state"):
                held[key.boundary, key.role, key.slot].add((rank, key.placement.sharded))

    moments = {name: ranks for name, ranks in held.items() if name[1] == "optimizer_state"}
    assert len(moments) == 4 * 3  # step and two moments of each parameter
    assert all(len(ranks) == 1 and {"dp"} == {*next(iter(ranks))[1]} for ranks in moments.values())
    assert {rank for ranks in moments.values() for rank, _ in ranks} == {0, 1}
    weights = [ranks for name, ranks in held.items() if name[1] == "param"]
    assert weights == [{(0, ()), (1, ())}] * 4


def test_the_broadcasts_behind_the_update_have_a_phase_of_their_own(two_ranks, tmp_path):
    two_ranks.run(train, str(tmp_path / "run"))
    batch = open_trace(tmp_path / "run").read(0, STEPS - 1)
    keys = [batch.key_of(row) for row in range(len(batch))]

    shared = {key.boundary for key in keys if key.phase == "param_sync"}
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert shared == {f"broadcast[dp] {name}" for name in names}


def test_an_update_that_is_not_broadcast_is_found(two_ranks, tmp_path):
    two_ranks.run(train, str(tmp_path / "faulty"), True)
    two_ranks.run(train, str(tmp_path / "clean"))

    first = check(tmp_path / "faulty").broken[0]
    verdict = compare_runs(*(open_trace(tmp_path / name) for name in ("clean", "faulty")))

    assert (first.invariant, first.role, first.ranks) == ("replicas-agree", "param", [0, 1])
    assert first.boundary in {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (first.step, first.phase) in {(1, "optimizer"), (2, "start")}
    assert (verdict.first_divergence.step, verdict.first_divergence.kind) == (1, "collective")


def test_what_a_rank_loads_of_the_states_is_what_it_was_given(two_ranks, tmp_path):
    two_ranks.run(saves_and_loads, str(tmp_path / "run"))

    report = check(tmp_path / "run")

    assert report.broken == []
    assert report.checked["saved-is-loaded"] >= 2 * 6


@pytest.mark.long
@pytest.mark.parametrize("level", ["module", "op"])
def test_steps_that_overlap_with_backward_are_seen_and_nothing_is_broken(
    two_ranks, tmp_path, level
):
    bare = two_ranks.run(overlapped, None, level)
    for name in ("baseline", "target"):
        assert two_ranks.run(overlapped, str(tmp_path / name), level) == bare

    baseline, target = (open_trace(tmp_path / name) for name in ("baseline", "target"))
    report = check(tmp_path / "baseline")

    assert compare_runs(baseline, target).verdict == "identical"
    assert ([one.explanation for one in report.broken], report.suspects) == ([], [])
    assert report.checked["replicas-agree"] > 0
    batch = baseline.read(0, STEPS + 1)
    keys = [batch.key_of(row) for row in range(len(batch))]
    assert {"optimizer_state", "param"} <= {key.role for key in keys if key.phase == "start"}
    weights = [baseline.read(0, step) for step in (STEPS, STEPS + 1)]
    moved = [
        {int(b.h[row]) for row in range(len(b)) if b.key_of(row).role == "param"} for b in weights
    ]
    assert moved[0] != moved[1]
