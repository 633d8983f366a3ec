"""Recomputes that must repeat, and tensors that must be consumed as they were produced."""

from __future__ import annotations

from tests.invariants.memory_checks import check, first
from tests.memory_run import edited

RECOMPUTED = """
    forward   0  input   block/0      x      Block
    forward   0  input   drop/0       a      Dropout
    forward   0  output  drop/0       b      Dropout
    forward   0  output  drop/0       b      aten.native_dropout
    forward   0  output  block/0      y      Block
    recompute 0  input   block/0      x      Block
    recompute 0  input   drop/0       a      Dropout
    recompute 0  output  drop/0       b      aten.native_dropout#
"""


def test_a_recompute_that_differs_from_its_forward_is_broken():
    faulty = edited(RECOMPUTED, ("b      aten.native_dropout#", "b2     aten.native_dropout"))
    clean = edited(RECOMPUTED, ("dropout#", "dropout"))

    assert first(check(faulty)) == ("recompute-repeats", 0, "recompute", "drop", "output", [0])
    report = check(clean)
    assert (report.broken, report.checked["recompute-repeats"]) == ([], 3)


CONSUMED = """
    forward   0  output  fc/0         y      Linear
    forward   0  output  act/0        z      aten.relu  by=0
    forward   0  input   head/0       y      Linear     by=0
"""


def test_a_tensor_that_was_overwritten_out_of_sight_is_broken():
    faulty = edited(CONSUMED, ("head/0       y ", "head/0       y2 "))

    report = check(faulty, level="op")
    assert first(report) == ("consumed-as-produced", 0, "forward", "head", "input", [0])
    assert report.broken[0].producer.boundary == "fc"
    assert check(CONSUMED, level="op").broken == []
    assert check(faulty, level="module").broken == []


def test_a_write_in_place_that_was_seen_is_a_part_of_the_program():
    seen = edited(
        CONSUMED,
        ("head/0       y ", "head/0       y2 "),
        ("z      aten.relu ", "y2     aten.relu_  moment=after "),
    )
    assert check(seen, level="op").broken == []
