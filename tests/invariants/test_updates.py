"""Weights that must move, and weights that must not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.invariants.memory_checks import check, first
from tests.memory_run import MemoryRun, batch, edited, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run

STEP = """
    start     -  param   fc.weight/value   w
    forward   0  param   fc.weight/value   w
    grad_sync -  grad    fc.weight/grad    g
    optimizer -  scalar  optimizer.group0.lr/0  lr  float64 []
    optimizer -  param   fc.weight/value   w1
"""
NEXT = STEP.replace("w1", "w2").replace("  w\n", "  w1\n")


def test_weights_that_are_not_the_updated_ones_are_broken():
    use = "forward   0  param   fc.weight/value   w"
    stale = edited(NEXT, (f"{use}1", use))

    assert first(check([STEP, stale])) == (
        "weights-in-use",
        1,
        "forward",
        "fc.weight",
        "param",
        [0],
    )
    assert check([STEP, NEXT]).broken == []


def test_weights_that_came_from_other_ranks_may_differ_from_those_found():
    late = edited(
        NEXT,
        ("    forward   0  param   fc.weight/value   w1", """
    forward   -  output  all_gather[dp]/0  w9  op=all_gather group=0:0 moment=completion
    forward   0  param   fc.weight/value   w9"""),
    )  # fmt: skip
    assert check([STEP, late]).broken == []


EVALUATED = STEP + "    eval -  output  head/0  y\n"
FOUND = "    start     -  param   fc.weight/value   w3\n"


def test_an_evaluation_that_changes_weights_is_broken():
    third = NEXT.replace("w2", "w3").replace("  w1\n", "  w2\n")
    evaluates = third + "    eval -  output  head/0  y\n"

    faulty = check([STEP, NEXT, evaluates, FOUND.replace("w3", "w9")])
    clean = check([STEP, NEXT, evaluates, FOUND])

    assert first(faulty) == ("eval-leaves-weights", 3, "start", "fc.weight", "param", [0])
    assert (clean.broken, clean.checked["eval-leaves-weights"]) == ([], 1)


def test_a_program_that_always_writes_its_weights_is_let_alone():
    always = [STEP, FOUND.replace("w3", "w7"), EVALUATED, FOUND.replace("w3", "w9")]

    assert check(always).broken == []


def with_rates(texts: list[str], rate: float) -> MemoryRun:
    """The same with a value for the learning rate."""
    batches = []
    for step, text in enumerate(texts):
        made = batch(step, events(text))
        rates = [rate if made.key_of(row).role == "scalar" else np.nan for row in range(len(made))]
        batches.append(replace(made, value=np.array(rates)))
    return MemoryRun({0: batches})


def test_a_weight_that_never_moves_is_broken():
    still = STEP.replace("w1", "w")

    report = check_run(with_rates([still, still], 0.1), Selection())
    assert first(report) == ("weights-move", 0, "optimizer", "fc.weight", "param", [0])
    assert check_run(with_rates([STEP, NEXT], 0.1), Selection()).broken == []
    assert check_run(with_rates([still, still], 0.0), Selection()).broken == []


def test_a_weight_in_bfloat16_that_never_moves_is_a_suspect():
    still = STEP.replace("w1", "w").replace("/value   w", "/value   w  bfloat16")

    report = check_run(with_rates([still, still], 0.1), Selection())
    assert report.broken == []
    assert [one.invariant for one in report.suspects] == ["weights-move"]


def test_a_frozen_weight_that_changes_is_a_suspect():
    found = "    start     -  param   frozen/value   w\n"

    report = check([found, found.replace("   w\n", "   w2\n")])
    assert [one.invariant for one in report.suspects] == ["frozen-stay"]
    assert check([found, found]).checked["frozen-stay"] == 1
