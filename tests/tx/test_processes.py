"""Pairs of TX layouts, clean and with a fault: each number of processes gives one answer."""

from __future__ import annotations

import pytest

from tests.compare.teams import together
from tests.tx.test_pairs import (  # recorded: the fixture that trains
    EP2,
    ONE,
    SP2_DP2,
    TP2,
    TP2_PP2,
    recorded,
)
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.trace.reader import open_trace

__all__ = ["recorded"]

# baseline, target, the target's fault, how both train
PAIRS = [
    (ONE, TP2_PP2, "unreduced in stage 0", {"microbatches": 2}),
    (TP2, SP2_DP2, "", {}),
    (ONE, EP2, "expert gradients doubled", {"moe": True}),
]


@pytest.mark.parametrize(("ours", "theirs", "fault", "how"), PAIRS)
def test_every_number_of_processes_gives_the_same_answer(recorded, ours, theirs, fault, how):
    baseline = open_trace(recorded(ours, **how))
    target = open_trace(recorded(theirs, fault, **how))

    for exact, sizes in ((True, (2, 4)), (False, (3,))):
        alone = compare_runs(baseline, target, exact=exact)
        for size in sizes:
            answers = together(size, baseline, target, exact=exact)
            assert [one.model_dump_json() for one in answers] == [alone.model_dump_json()] * size
        if exact:
            assert alone.verdict == ("divergent" if fault else "identical")
