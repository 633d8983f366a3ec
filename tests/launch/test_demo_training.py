"""The demo's trainings themselves, without capture: each is what its name says, and repeats."""

from __future__ import annotations

import pytest

from upguard_plugin.launch.demo.faults import FAULTS
from upguard_plugin.launch.demo.jobs import LAYOUTS, NUM_STEPS, Job
from upguard_plugin.launch.demo.ranks import train

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of both ranks, by fault and layout; the plain training of each layout is "first" too."""
    twins = [Job("none", layout) for layout in LAYOUTS]
    faulty = [Job(name, fault.layout) for name, fault in FAULTS.items() if name != "none"]
    jobs = [*twins, *twins, *faulty]
    results = train(jobs, tmp_path_factory.mktemp("ranks"))
    first = {("first", layout): ranks for layout, ranks in zip(LAYOUTS, results, strict=False)}
    return first | {(j.fault, j.layout): ranks for j, ranks in zip(jobs, results, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_trainings_end_with_the_same_bits(outcomes, layout):
    first, second = outcomes["first", layout], outcomes["none", layout]

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
