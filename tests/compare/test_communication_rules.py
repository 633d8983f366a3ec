"""What only communication can have done, although no collective differs itself."""

from __future__ import annotations

import pytest

from tests.compare.streams import answer, two_ranks
from tests.memory_run import MemoryRun, batch, edited, events
from upguard_plugin.compare.runs import compare_runs

DROPPED = """
forward   0  input   leave/args.0            part{r}  Leave
forward   0  input   all_reduce[tp]/0  part{r}  group=0,1:0 op=all_reduce_sum moment=launch
forward   0  output  all_reduce[tp]/0  sum  group=0,1:0 op=all_reduce_sum moment=completion
forward   0  output  leave/out               sum      Leave
"""
LATE = """
start     -  param   fc1.weight/value        old{r}
forward   0  param   fc1.weight/value        new
forward   0  output  fc1/out                 y{r}     Linear
"""
BEFORE = """
start     -  param   fc1.weight/value        older{r}
forward   0  param   fc1.weight/value        older{r}
"""


def both(text: str, name: str = "run"):
    return two_ranks(text.format(r=0), text.format(r=1), name=name)


def test_a_result_that_is_given_on_by_nobody_is_the_collectives():
    dropped = edited(DROPPED, ("leave/out               sum", "leave/out  part{r}"))

    verdict = compare_runs(both(DROPPED), both(dropped, "target"))

    assert answer(verdict) == "0 0 forward leave output collective"
    assert verdict.first_divergence.ranks == [0, 1]


def test_another_wrong_value_behind_a_collective_is_the_modules():
    wrong = edited(DROPPED, ("leave/out               sum", "leave/out  other"))

    verdict = compare_runs(both(DROPPED), both(wrong, "target"))

    assert answer(verdict) == "0 0 forward leave output forward"


def late(text: str, name: str = "run"):
    return MemoryRun(
        {
            rank: [batch(i, events(part.format(r=rank))) for i, part in enumerate((BEFORE, text))]
            for rank in (0, 1)
        },
        name,
    )


def test_an_update_that_has_not_arrived_when_it_is_used_is_the_collectives():
    stale = edited(LATE, ("  new", "  old{r}"))

    verdict = compare_runs(late(LATE), late(stale, "target"))

    assert answer(verdict) == "1 0 forward fc1.weight param collective"


def test_a_weight_that_is_neither_old_nor_new_is_no_late_update():
    wrong = edited(LATE, ("  new", "  other"))

    verdict = compare_runs(late(LATE), late(wrong, "target"))

    assert answer(verdict) == "1 0 forward fc1.weight param forward"


MAXIMUM = """
forward   0  output  qkv/out            y{r}     Linear
forward   0  input   all_reduce[tp]/0   amax{r}  group=0,1:0 op=all_reduce_max moment=launch
forward   0  output  all_reduce[tp]/0   amax1    group=0,1:0 op=all_reduce_max moment=completion
forward   0  output  head/out           z{r}     Linear
"""


def without_reduction(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "all_reduce" not in line)


def test_a_missing_collective_differs_on_the_ranks_that_it_would_have_changed():
    verdict = compare_runs(both(MAXIMUM), both(without_reduction(MAXIMUM), "target"))

    assert answer(verdict) == "0 0 forward all_reduce[tp] input collective"
    assert verdict.first_divergence.ranks == [0]
    assert verdict.concurrent == []
    assert [found.ranks for found in verdict.per_rank] == [[0], [1]]  # it is missing on both


def test_a_missing_collective_that_changes_nothing_is_missing_on_all_ranks():
    agreed = MAXIMUM.replace("amax{r}", "amax1")

    verdict = compare_runs(both(agreed), both(without_reduction(agreed), "target"))

    assert answer(verdict) == "0 0 forward all_reduce[tp] input collective"
    assert verdict.first_divergence.ranks == [0, 1]


BUCKET = """
accumulate 0 grad    head.weight/grad    g
grad_sync -  input   all_reduce[dp]/0    g  group=0,1:0 op=all_reduce_sum moment=launch holds=head
grad_sync -  output  all_reduce[dp]/0    s  group=0,1:0 op=all_reduce_sum moment=completion
"""


@pytest.mark.parametrize(
    ("writer", "verb"),
    [("by=0", "was overwritten by"), ("", "holds")],
    ids=["whose writer is equal", "whose writer is not known"],
)
def test_a_buffer_that_holds_another_gradient_names_both(writer, verb):
    filled = BUCKET.replace("holds=head", f"holds=head {writer}")
    refilled = edited(filled, ("/0    g ", "/0    f "), ("holds=head", "holds=fc2"))

    found = compare_runs(both(filled), both(refilled, "target")).first_divergence

    assert found.explanation == (
        "The all_reduce sum: input 0 of all_reduce[dp] differs at launch: its buffer holds head "
        f"in the baseline, and {verb} fc2 in the target."
    )
    assert [side.holds[0].name for side in (found.baseline, found.target)] == ["head", "fc2"]


def test_what_a_buffer_holds_is_no_difference_by_itself():
    renamed = edited(BUCKET, ("holds=head", "holds=fc2"))

    assert compare_runs(both(BUCKET), both(renamed, "target")).verdict == "identical"
