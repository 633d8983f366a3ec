"""The demo's trainings themselves: each is what its name says, repeats, and is not disturbed."""

from __future__ import annotations

import pytest

from upguard_plugin.launch.demo.faults import FAULTS
from upguard_plugin.launch.demo.jobs import LAYOUTS, NUM_STEPS, Job
from upguard_plugin.launch.demo.ranks import train

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of both ranks, by name and layout: twins, one with capture, and every fault."""
    runs = tmp_path_factory.mktemp("runs")
    jobs = {("none", layout): Job("none", layout) for layout in LAYOUTS}
    jobs |= {("twin", layout): Job("none", layout) for layout in LAYOUTS}
    jobs |= {("recorded", layout): Job("none", layout, str(runs / layout)) for layout in LAYOUTS}
    for name, fault in FAULTS.items():
        jobs.setdefault((name, fault.layout), Job(name, fault.layout))
    results = train(list(jobs.values()), tmp_path_factory.mktemp("ranks"))
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", ["twin", "recorded"])
def test_a_repeat_or_a_recorded_training_ends_with_the_same_bits(outcomes, layout, other):
    first, second = outcomes["none", layout], outcomes[other, layout]

    assert [rank.weights for rank in first] == [rank.weights for rank in second]
    assert [rank.losses for rank in first] == [rank.losses for rank in second]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_fault_changes_the_weights(outcomes, fault):
    layout = FAULTS[fault].layout

    assert outcomes[fault, layout][0].weights != outcomes["none", layout][0].weights


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_fault_leaves_the_steps_before_it_alone(outcomes, fault):
    layout = FAULTS[fault].layout
    expected = FAULTS[fault].expected

    for faulty, plain in zip(outcomes[fault, layout], outcomes["none", layout], strict=True):
        assert faulty.losses[: expected.step] == plain.losses[: expected.step]


def test_the_model_learns(outcomes):
    for ranks in outcomes.values():
        for rank in ranks:
            assert len(rank.losses) == NUM_STEPS
            assert 4 < rank.losses[-1] < rank.losses[0] < 6  # ln(256) is 5.5


def test_replicas_agree_unless_their_all_reduce_is_missing(outcomes):
    plain = {rank.weights for rank in outcomes["none", "dp2"]}
    faulty = {rank.weights for rank in outcomes["missing-all-reduce", "dp2"]}

    assert (len(plain), len(faulty)) == (1, 2)


def test_tensor_parallel_ranks_see_one_loss(outcomes):
    rank_0, rank_1 = outcomes["none", "tp2"]

    assert rank_0.losses == rank_1.losses
