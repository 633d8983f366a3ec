"""Replicas that must agree: a fault and its clean twin differ in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.invariants.memory_checks import REPLICA, TWO, check, first, layout
from tests.memory_run import MemoryRun, batch, edited, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.records import Axis, Layout, Placement


def test_a_gradient_that_differs_between_replicas_is_broken():
    report = check(REPLICA, edited(REPLICA, ("g     at", "g2    at"), ("local", "mine")))

    assert first(report) == ("replicas-agree", 0, "grad_sync", "fc.weight", "grad", [0, 1])
    assert report.exit_code == 1


def test_replicas_that_agree_are_not():
    report = check(REPLICA, edited(REPLICA, ("local", "mine")))

    assert (report.broken, report.suspects) == ([], [])
    assert report.checked["replicas-agree"] == 3
    assert report.exit_code == 0


def test_the_rank_that_stands_alone_is_named():
    ranks = [REPLICA, edited(REPLICA, ("g     at", "g2    at")), REPLICA]
    batches = {r: [batch(0, events(text))] for r, text in enumerate(ranks)}
    axes = {r: Layout((Axis("dp", 3, r, (0, 1, 2)),)) for r in batches}

    report = check_run(MemoryRun(batches, layouts=axes), Selection())

    assert report.broken[0].ranks == [1]
    assert report.broken[0].explanation == (
        "Gradient of fc.weight must be the same on ranks 0, 1, 2, but rank 1 has other bits than "
        "ranks 0, 2."
    )


@pytest.mark.parametrize(("axes", "broken"), [(("dp",), True), (("tp",), False), (("pp",), False)])
def test_state_without_a_rule_is_a_replica_over_dp_only(axes, broken):
    report = check(REPLICA, edited(REPLICA, ("g     at", "g2    at")), axes=axes)

    assert bool(report.broken) == broken


def test_state_without_any_placement_is_a_suspect():
    bare = REPLICA.replace("at=*", "")
    report = check(bare, edited(bare, ("/grad    g ", "/grad    g2 ")))

    assert [one.role for one in report.suspects] == ["grad"]
    assert report.broken == []


def test_a_replica_on_a_rank_without_gradient_is_broken():
    without = edited(REPLICA, ("g     at=*", "-  none"))
    batches = {
        0: [batch(0, events(REPLICA))],
        1: [batch(0, [replace(e, key=replace(e.key, dtype="none")) if e.value == "-" else e
                      for e in events(without.replace(" none", ""))])],
    }  # fmt: skip
    report = check_run(MemoryRun(batches, layouts={r: layout(r, "dp") for r in TWO}), Selection())

    assert first(report)[:2] == ("replicas-agree", 0)
    assert report.broken[0].explanation.endswith("but rank 1 has none.")


def test_a_given_placement_is_a_replica_over_the_axes_it_does_not_name():
    (event,) = events("    forward   0  output  norm/0   y\n")
    split = Placement("s[tp] h", (8, 8), (), sharded=("tp",))
    whole = Placement("s h", (4, 8), ())
    found = {}
    for name, placement in (("split", split), ("whole", whole)):
        seen = {
            rank: replace(event, value=rank, key=replace(event.key, placement=placement))
            for rank in TWO
        }
        run = MemoryRun(
            {rank: [batch(0, [seen[rank]])] for rank in TWO},
            layouts={rank: layout(rank, "tp", "dp") for rank in TWO},
        )
        found[name] = [one.invariant for one in check_run(run, Selection()).broken]

    assert found == {"split": [], "whole": ["replicas-agree"]}
