"""Checks of runs in memory: what the tests of all invariants need.

Runs are written as in tests/memory_run.py; equal text means equal bits.
"""

from __future__ import annotations

from tests.memory_run import MemoryRun, batch, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.records import Axis, Layout

TWO = (0, 1)


def layout(rank: int, *names: str, mesh: str = "dense") -> Layout:
    return Layout(tuple(Axis(name, 2, rank, TWO, mesh) for name in names))


def check(*ranks: list[str] | str, axes: tuple[str, ...] = ("dp",), **settings):
    """The report on a run; each argument is a rank's steps."""
    steps = [[one] if isinstance(one, str) else one for one in ranks]
    batches = {
        rank: [batch(i, events(text)) for i, text in enumerate(texts)]
        for rank, texts in enumerate(steps)
    }
    layouts = {rank: layout(rank, *axes) for rank in batches}
    return check_run(MemoryRun(batches, layouts=layouts, **settings), Selection())


def first(report) -> tuple:
    found = report.broken[0]
    return found.invariant, found.step, found.phase, found.boundary, found.role, found.ranks


REPLICA = """
    start     -  param   fc.weight/value   w     at=*
    backward  0  grad_output  fc/0         local at=*
    grad_sync -  grad    fc.weight/grad    g     at=*
    optimizer -  param   fc.weight/value   w1    at=*
"""
