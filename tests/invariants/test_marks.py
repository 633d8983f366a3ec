"""Declared placements that contradict the classes of modules, or the values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.invariants.memory_checks import layout
from tests.memory_run import MemoryRun, batch, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.records import Piece, Placement


@pytest.mark.parametrize(
    ("cls", "sharded", "why"),
    [
        ("LayerNorm", ("tp",), "cuts it over tp"),
        ("ColumnParallelLinear", (), "has it whole on every rank of tp"),
        ("LayerNorm", (), None),
        ("ColumnParallelLinear", ("tp",), None),
        ("Linear", ("tp",), None),
    ],
)
def test_a_mark_that_contradicts_the_modules_class_is_a_suspect(cls, sharded, why):
    found, called = events(f"""
        start   - param  fc.weight/value w
        forward 0 output fc/0            y {cls}
    """)
    placement = Placement("o i", (4, 8), (), sharded=sharded)
    found = replace(found, key=replace(found.key, placement=placement))
    run = MemoryRun({0: [batch(0, [found, called])]}, layouts={0: layout(0, "tp")})

    report = check_run(run, Selection())

    sentence = f"Parameter fc.weight belongs to a {cls}, but its placement {why}."
    assert [one.explanation for one in report.suspects] == ([sentence] if why else [])
    assert report.broken == []


def cut(parts: dict[int, list[float]], norm: float) -> MemoryRun:
    """A weight that is declared as cut, in each step with that largest magnitude on each rank.

    norm: of its sketch, over that of a constant.
    """
    (event,) = events("    start - param fc.weight/value w")
    batches = {}
    for rank, magnitudes in parts.items():
        piece = Piece((4, 8), 0, (8, 1), 32 * rank, (8, 1))
        placement = Placement("o[tp] i", (8, 8), (piece,), sharded=("tp",))
        placed = replace(event, value=rank, key=replace(event.key, placement=placement))
        batches[rank] = [
            replace(
                batch(step, [placed]),
                max_abs=np.array([magnitude]),
                nonfinite=np.zeros(1, np.int64),
                sketch=np.array([[norm * magnitude * 32**0.5, 0.0, 0.0, 0.0]]),
            )
            for step, magnitude in enumerate(magnitudes)
        ]
    return MemoryRun(batches, layouts={rank: layout(rank, "tp") for rank in parts})


ODD, OTHER = 1 + 3 * 2.0**-22, 1 + 5 * 2.0**-22  # 22 significant bits


@pytest.mark.parametrize(
    ("parts", "norm", "suspected"),
    [
        ({0: [ODD], 1: [ODD]}, 0.5, True),
        ({0: [ODD], 1: [OTHER]}, 0.5, False),
        ({0: [ODD], 1: [ODD]}, 1.0, False),  # a constant
        ({0: [ODD, ODD], 1: [ODD, ODD]}, 1.0, False),  # that stays one
        ({0: [1.0, ODD], 1: [1.0, ODD]}, 1.0, True),  # it has moved alike on both
        ({0: [1.0, ODD], 1: [1.0, OTHER]}, 1.0, False),
        ({0: [1.5, 1.25], 1: [1.5, 1.25]}, 0.5, False),  # by chance
        ({0: [0.0], 1: [0.0]}, 0.0, False),
    ],
)
def test_parts_that_are_the_same_on_all_ranks_are_a_suspect(parts, norm, suspected):
    report = check_run(cut(parts, norm), Selection())

    sentence = (
        "Parameter fc.weight is declared as cut over tp, but ranks 0, 1 hold the same: it may be "
        "whole on each."
    )
    assert [one.explanation for one in report.suspects] == ([sentence] if suspected else [])
    assert report.broken == []


def test_without_a_sketch_equal_parts_are_not_told():
    run = cut({0: [ODD], 1: [ODD]}, 0.5)
    bare = {r: [replace(run.read(r, 0), max_abs=None)] for r in run.ranks}

    report = check_run(MemoryRun(bare, layouts={r: layout(r, "tp") for r in bare}), Selection())

    assert report.suspects == []
    assert report.not_applied["parts-differ"] == {"no sketch was recorded (sketch: true)": 1}
