"""What a report says of a run: what is selected, undecided, listed once."""

from __future__ import annotations

from tests.invariants.memory_checks import REPLICA, TWO, check, layout
from tests.memory_run import MemoryRun, batch, edited, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run


def test_a_selection_limits_what_is_reported():
    faulty = edited(REPLICA, ("g     at", "g2    at"))
    batches = {0: [batch(0, events(REPLICA))], 1: [batch(0, events(faulty))]}
    run = MemoryRun(batches, layouts={rank: layout(rank, "dp") for rank in TWO})

    assert check_run(run, Selection.parse(roles="param")).broken == []
    assert check_run(run, Selection.parse(roles="grad")).broken != []


def test_a_run_with_nothing_to_check_is_undecided():
    report = check("    forward   0  output  fc/0   y\n")

    assert (report.answer, report.exit_code) == ("undecided", 3)
    assert report.notes[0].startswith("nothing to check")


def test_missing_ranks_leave_an_unbroken_run_undecided():
    report = check(REPLICA, REPLICA, missing=(2,))

    assert (report.answer, report.broken) == ("undecided", [])


def test_a_break_is_listed_once_where_it_comes_first():
    faulty = edited(REPLICA, ("g     at", "g2    at"))

    report = check([REPLICA, REPLICA], [faulty, faulty])

    assert [(one.step, one.later) for one in report.broken] == [(0, 1)]
