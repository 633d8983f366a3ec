"""What columns make of the parts that ranks hold, against what each part adds."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.layouts.split_runs import Mesh, split_run
from tests.memory_run import hash_of
from upguard_plugin.compare.layouts.gathering import Gathering, StepOf
from upguard_plugin.compare.layouts.holdings import plan_of, structure_of
from upguard_plugin.compare.layouts.logical import LogicalPair
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.team import Alone
from upguard_plugin.records import FINGERPRINT_PRIME


def test_a_cut_weight_is_the_sum_of_its_parts_and_replicas_count_once():
    run = split_run(Mesh(tp=4, dp=2), 1)

    ((plan, held),) = [
        (step.plan, step.held) for step in Gathering([run], Alone()).steps([StepOf(0, 0)])
    ]

    cut = [
        row for row, one in enumerate(plan.holdings) if one.seen.what[:2] == ("start", "fc.weight")
    ]
    assert [plan.holdings[row].ranks for row in cut] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    total = sum(held.values.h[cut].tolist()) % FINGERPRINT_PRIME
    assert total == hash_of(("start", "param", "fc.weight", -1, 0))
    assert not len(held.others.holding)


def test_holders_that_disagree_are_all_known_and_equal_values_once():
    flips = {(5, 0, 0): 1, (6, 0, 1): 2, (7, 0, 1): 2}
    run = split_run(Mesh(tp=4, dp=2), 1, flips=flips)

    (step,) = Gathering([run], Alone()).steps([StepOf(0, 0)])

    disputed = Counter(
        step.plan.holdings[row].seen.what[1] for row in step.held.others.holding.tolist()
    )
    assert disputed == {"fc.weight": 1, "norm.weight": 1}


def test_steps_of_one_structure_have_one_plan():
    run = split_run(Mesh(tp=2), 3)
    batches = [{rank: run.read(rank, step) for rank in run.ranks} for step in range(3)]
    layouts = {rank: run.layout(rank) for rank in run.ranks}

    assert len({structure_of(one) for one in batches}) == 1
    plans = [plan_of(one, layouts)[0] for one in batches[:2]]
    assert plans[0].holdings == plans[1].holdings


def test_another_call_number_is_another_structure():
    run = split_run(Mesh(), 2)
    first, second = ({0: run.read(0, step)} for step in range(2))
    second[0].call[3] = 1

    assert structure_of(first) != structure_of(second)


def test_logical_events_stand_in_the_order_of_one_rank():
    """Micro-batches follow each other, whichever rank had them."""
    runs = split_run(Mesh(), 1), split_run(Mesh(tp=2, dp=2), 1)
    pair = LogicalPair(Gathering(runs, Alone()), 0, 1)
    pair.match({0: 0})

    batches = [pair.events(side, 0).batch for side in (0, 1)]

    names = [
        [
            (key.phase, key.boundary, key.role, microbatch)
            for key, microbatch in zip(
                (batch.keys[k] for k in batch.key), batch.microbatch.tolist(), strict=True
            )
        ]
        for batch in batches
    ]
    assert names[0] == names[1]
    assert np.array_equal(batches[0].h, batches[1].h)
    in_model = [microbatch for _, _, _, microbatch in names[0] if microbatch >= 0]
    assert in_model == sorted(in_model)


def test_what_cannot_be_merged_leaves_no_key_behind():
    """Keys tell what a run records: a gradient that only one side has is judged by them."""
    runs = split_run(Mesh(), 1), split_run(Mesh(tp=2), 1, drops=[(1, 0, 30)])
    pair = LogicalPair(Gathering(runs, Alone()), 0, 1)
    pair.match({0: 0})

    for side in (0, 1):
        batch = pair.events(side, 0).batch
        assert set(batch.key.tolist()) == set(range(len(batch.keys)))
        assert ("fc.weight", "grad") not in {(key.boundary, key.role) for key in batch.keys}


def test_a_share_that_is_no_number_makes_the_sum_none_and_is_found():
    """Also if it is not the first rank's."""
    baseline, target = split_run(Mesh(), 1), split_run(Mesh(dp=2), 1)
    batch = target.batches[1][0]
    batch.value[-1] = np.nan
    batch.h[-1] += np.uint64(1)

    verdict = compare_runs(baseline, target)

    first = verdict.first_divergence
    assert first is not None and first.boundary == "loss"
