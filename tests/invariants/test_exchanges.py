"""Collectives and messages: what members call, and what they give and get."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.invariants.memory_checks import TWO, check, first
from tests.memory_run import MemoryRun, batch, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run

SUMMED = """
    grad_sync -  input   all_reduce[dp]/0  {}   op=all_reduce_sum moment=launch     group=0,1:0
    grad_sync -  output  all_reduce[dp]/0  {}  op=all_reduce_sum moment=completion group=0,1:0
"""


def summed(output: float, unit: float = 1.0, dtype: str = "float32") -> MemoryRun:
    """Sketches of 1 and 2 go in, that of `output` comes out, in units."""
    batches = {}
    for rank in TWO:
        made = batch(0, events(SUMMED.format(f"x{rank} dtype={dtype}", f"sum dtype={dtype}")))
        sketch = unit * np.array([[rank + 1.0] * 4, [output] * 4])
        batches[rank] = [replace(made, sketch=sketch, nonfinite=np.zeros(2, np.int64))]
    return MemoryRun(batches)


def test_a_sum_that_lost_a_rank_is_broken():
    report = check_run(summed(2.0), Selection())

    assert first(report)[0] == "sums-conserved"
    rounded = check_run(summed(3.0 * (1 + 2**-23)), Selection())
    assert (rounded.broken, rounded.checked["sums-conserved"]) == ([], 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_near_zero_are_rounded_to_the_next_one_whatever_their_size(dtype):
    unit = 2.0**-23 if dtype == "float16" else 2.0**-126  # a flushed denormal is lost whole

    rounded = check_run(summed(2.75, unit, dtype), Selection())
    assert (rounded.broken, rounded.checked["sums-conserved"]) == ([], 1)
    lost = check_run(summed(2.0, 64 * unit, dtype), Selection())
    assert first(lost)[0] == "sums-conserved"


def test_without_sketches_a_sum_is_not_checked():
    report = check(SUMMED.format("x0", "sum"), SUMMED.format("x1", "sum"))

    assert report.not_applied["sums-conserved"] == {"no sketch was recorded (sketch: true)": 1}


CALLED = (
    "    grad_sync -  input  all_reduce[dp]/0  {}  op=all_reduce_sum moment=launch group=0,1:{}\n"
)
TWICE = CALLED.format("x", 0) + CALLED.format("y", 1)
LAST = CALLED.format("z", 2)
OTHER = CALLED.format("y", 1).replace("all_reduce_sum", "all_reduce_avg")


@pytest.mark.parametrize(
    ("others", "ranks", "why"),
    [
        ([CALLED.format("x", 0)], [0, 1],
         "all_reduce sum is number 1 of group dp on rank 0, but rank 1 never called it."),
        ([CALLED.format("x", 0), OTHER], [0, 1],
         "Ranks call different operations as number 1 of group dp: all_reduce sum on rank 0, "
         "all_reduce avg on rank 1."),
    ],
)  # fmt: skip
def test_a_collective_that_a_member_leaves_out_is_broken(others, ranks, why):
    report = check([TWICE, ""], [*others, ""][:2])

    assert first(report)[:2] == ("collectives-match", 0)
    assert (report.broken[0].ranks, report.broken[0].explanation) == (ranks, why)


@pytest.mark.parametrize(
    "others",
    [
        [TWICE, LAST],
        [CALLED.format("x", 0), CALLED.format("y", 1) + LAST],  # a step later
        [CALLED.format("x", 0), LAST],  # called, and not recorded
    ],
)
def test_a_collective_that_a_member_calls_later_is_not(others):
    assert check([TWICE, LAST], others).broken == []


def test_a_rank_whose_trace_has_gaps_may_have_called_it():
    listed = events(CALLED.format("x", 0) + CALLED.format("y", 5) + CALLED.format("y", 1))
    gap = batch(0, listed)
    kept = {
        name: getattr(gap, name)[[0, 2]]
        for name in ("key", "seq", "microbatch", "call", "h", "s", "producer", "group_seq", "peer",
                     "pair_seq")
    }  # fmt: skip
    run = MemoryRun({0: [batch(0, events(TWICE + LAST))], 1: [replace(gap, **kept)]})

    report = check_run(run, Selection())

    assert report.broken == []
    assert report.not_applied["collectives-match"] == {"a member of the group was not recorded": 1}


SENT = "    forward - input  send[pp]/0 x op=send moment=launch     group=0,1:-1 pair=1:{}\n"
GOT = "    forward - output recv[pp]/0 x op=recv moment=completion group=0,1:-1 pair=0:{}\n"


def test_a_message_that_nobody_receives_is_broken():
    sent = SENT.format(0) + SENT.format(1)
    got = GOT.format(0)

    report = check(sent, got)
    assert first(report)[:2] == ("received-is-sent", 0)
    assert report.broken[0].explanation == (
        "Rank 0 sends message 1 of group dp that rank 1 never receives."
    )
    late = check([sent, ""], [got, GOT.format(1)])
    assert (late.broken, late.checked["received-is-sent"]) == ([], 2)


OUTPUT = "    grad_sync - output all_reduce[dp]/0 y op=all_reduce_sum moment=completion group=0:0\n"
USE = "    grad_sync - {} all_reduce[dp]/0 -  {} uint8 [0] group=0:-1\n"


def used(role: str, operator: str, was_over: float | None, level: str = "op") -> MemoryRun:
    """An output; and, unless it is None, a use of it before the wait."""
    text = OUTPUT + ("" if was_over is None else USE.format(role, operator))
    made = batch(0, events(text))
    values = np.array([np.nan, was_over][: len(made)], np.float64)
    return MemoryRun({0: [replace(made, value=values)]}, level=level)


READ = "aten.mul reads output 0 of all_reduce[dp] before the program has waited for the collective"
WRITTEN = (
    "Output 0 of all_reduce[dp] was written, or reshaped in place, "
    "while the collective was under way"
)


@pytest.mark.parametrize(
    ("role", "operator", "was_over", "broken", "suspects"),
    [
        ("input", "aten.mul", 0.0, [f"{READ}."], []),
        ("input", "aten.mul", 1.0, [], [f"{READ}, which happened to be over."]),
        ("output", "aten.mul_", 0.0, [f"{READ.replace('mul reads', 'mul_ writes')}."], []),
        ("output", "", 0.0, [], [f"{WRITTEN}."]),  # a version counter says so, which proves nothing
        ("output", "", 1.0, [], [f"{WRITTEN}, which happened to be over."]),
        ("input", "", None, [], []),
    ],
)
def test_an_output_that_is_used_before_the_wait_is_broken(
    role, operator, was_over, broken, suspects
):
    report = check_run(used(role, operator, was_over), Selection())

    assert [one.explanation for one in report.broken] == broken
    assert [one.explanation for one in report.suspects] == suspects
    assert report.checked["outputs-awaited"] == 1 + len(broken)


def test_below_level_op_nobody_says_that_an_output_was_left_alone():
    report = check_run(used("input", "", None, level="module"), Selection())

    assert "outputs-awaited" not in report.checked
    assert report.not_applied["outputs-awaited"] == {"level op alone sees who uses an output": 1}
