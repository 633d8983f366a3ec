"""Masters, tied weights, and weights put together from shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.invariants.memory_checks import check, first
from tests.memory_run import MemoryRun, batch, edited, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.records import Piece, Placement

MASTER = """
    start     -  param   fc.weight/value     w  bfloat16
    start     -  master  fc.weight/master    m
    start     -  master  fc.weight/rounded   w  bfloat16
"""


def test_a_master_that_does_not_round_to_its_weight_is_broken():
    stale = edited(MASTER, ("rounded   w ", "rounded   w0 "))

    assert first(check(stale)) == ("masters-round", 0, "start", "fc.weight", "master", [0])
    assert check(MASTER).checked["masters-round"] == 1


TIED = "    start     -  param   embed.weight/tied   e\n"


def test_a_tied_weight_that_differs_between_stages_is_broken():
    report = check(TIED, TIED.replace("  e\n", "  e2\n"), axes=("pp",))

    assert first(report) == ("tied-agree", 0, "start", "embed.weight", "param", [0, 1])
    assert check(TIED, TIED, axes=("pp",)).checked["tied-agree"] == 1


def gathered(used: int, second: int = 7, dtype: str = "float32"):
    """Shards 5 and `second` at their places; `used` is what a module uses, on each of two ranks."""
    start, use = events(f"""
        start   - param fc.weight/value 0
        forward 0 param fc.weight/value 0 {dtype}
    """)
    batches = {}
    for rank, value in ((0, 5), (1, second)):
        piece = Piece((4, 4), 0, (4, 1), 4 * rank, (8, 1))
        placement = Placement("o i[dp]", (4, 8), (piece,), sharded=("dp",))
        made = batch(0, [replace(start, key=replace(start.key, placement=placement)), use])
        batches[rank] = [replace(made, h=np.array([value, used], np.uint64))]
    return batches


def test_a_gathered_weight_is_what_its_shards_make():
    def report(batches):
        return check_run(MemoryRun(batches, missing=()), Selection())

    assert first(report(gathered(13)))[0] == "gathered-as-kept"
    assert report(gathered(12)).checked["gathered-as-kept"] == 2
    assert report(gathered(13, dtype="bfloat16")).broken == []
    one = report({0: gathered(13)[0]})
    assert one.broken == [] and "gathered-as-kept" in one.not_applied
