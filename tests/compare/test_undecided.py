"""What is not decided: incomplete runs, missing ranks, nothing in common."""

from __future__ import annotations

from tests.compare.streams import MLP, NEXT, answer, behind, compared, two_ranks
from tests.memory_run import MemoryRun, batch, edited, events, run
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.trace.batch import RankEnd

ENDED = {0: RankEnd(False, "killed or still running")}


def test_an_incomplete_run_is_never_identical_but_may_be_divergent():
    equal = compare_runs(run(MLP, NEXT), run(MLP, name="target", ends=ENDED))
    wrong = behind(MLP, "forward 0 output core/out")
    divergent = compare_runs(run(MLP, NEXT), run(wrong, name="target", ends=ENDED))

    assert (equal.verdict, equal.exit_code) == ("incomparable", 3)
    assert equal.notes[0] == (
        "incomplete: rank 0 of the target ended early (killed or still running); "
        "what was compared ends after 1 step"
    )
    assert (answer(divergent), divergent.exit_code) == ("0 0 forward core output forward", 1)


def test_runs_of_different_length_are_equal_only_as_far_as_both_go():
    verdict = compare_runs(run(MLP, NEXT), run(MLP, name="target"))

    assert verdict.exit_code == 3
    assert verdict.notes[0] == (
        "rank 0: 2 steps in the baseline, 1 in the target; "
        "what was compared are the 1 that both have"
    )


def test_missing_ranks_are_not_decided_unless_ranks_are_named():
    whole = two_ranks(MLP, MLP)
    part = MemoryRun({0: [batch(0, events(MLP))]}, "target", missing=(1,))

    verdict = compare_runs(whole, part)

    assert verdict.exit_code == 3
    assert verdict.notes[0] == (
        "missing ranks: the target lacks 1 (found 0); copy the missing files, or name the ranks "
        "to compare: --ranks 0"
    )
    assert compare_runs(whole, part, Selection.parse(ranks="0")).exit_code == 0
    assert compare_runs(whole, part, Selection.parse(ranks="0-1")).exit_code == 3


def test_two_runs_with_nothing_in_common_are_incomparable():
    other = "start - param conv.weight/value q\nforward 0 output conv/out z\n"

    verdict = compared(MLP, other)

    assert verdict.exit_code == 3
    assert "nothing in common" in verdict.notes[0]


def test_other_placements_are_not_comparable():
    placed = edited(MLP, ("fc1.weight/value     w1", "fc1.weight/value w1-at-2 at=o[tp]"))
    equal = edited(MLP, ("fc1.weight/value     w1", "fc1.weight/value w1 at=o[tp]"))

    verdict = compared(MLP, placed)

    assert (verdict.exit_code, verdict.coverage.not_comparable) == (3, 1)
    assert verdict.notes[0] == (
        "1 event not comparable: the runs give these tensors other placements"
    )
    assert compared(MLP, equal).exit_code == 0


def test_fingerprints_of_two_versions_are_refused():
    verdict = compare_runs(run(MLP), run(MLP, name="target", fingerprint_version=2))

    assert (verdict.exit_code, verdict.coverage.compared) == (3, 0)
    assert verdict.notes[0].startswith("fingerprints of version 1 and 2 cannot be compared")


def test_what_other_world_sizes_leave_uncompared_is_counted():
    verdict = compare_runs(run(MLP), two_ranks(MLP, MLP, name="target"))

    assert verdict.coverage.not_comparable > 0
    assert any(note.startswith("not compared: ") for note in verdict.notes)


def test_equal_digests_are_not_decoded():
    baseline, target = run(MLP, NEXT), run(MLP, edited(NEXT, ("r1", "r2")), name="target")

    compare_runs(baseline, target)

    assert (baseline.num_reads, target.num_reads) == (1, 1)
