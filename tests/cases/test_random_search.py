"""Faults drawn at random are named exactly: 40 of them, and 300 in the long run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cases.case import first_is, verdict_of
from tests.cases.random_search import answer, draw_fault, train


@pytest.fixture(scope="module")
def search(tmp_path_factory, recordings):
    """search(seed, num_ranks): the verdict on a fault, and whether it is exact."""
    folder = tmp_path_factory.mktemp("search")

    def baseline(num_ranks: int) -> Path:
        output = folder / f"baseline{num_ranks}"
        if not output.exists():
            recordings.on_ranks(num_ranks, train, None, num_ranks, str(output))
        return output

    def run(seed: int, num_ranks: int) -> tuple[bool, object]:
        fault = draw_fault(seed, num_ranks)
        output = folder / f"{num_ranks}-{seed}"
        recordings.on_ranks(num_ranks, train, fault, num_ranks, str(output))
        verdict = verdict_of(baseline(num_ranks), output)
        shutil.rmtree(output)
        return first_is(verdict, answer(fault)), (fault, verdict["first_divergence"])

    return run


@pytest.mark.parametrize("seed", range(30))
def test_a_random_fault_is_named_exactly(search, seed):
    exact, story = search(seed, 1)
    assert exact, story


@pytest.mark.parametrize("seed", range(10))
def test_a_random_fault_on_two_ranks_is_named_exactly(search, seed):
    exact, story = search(seed, 2)
    assert exact, story


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_hundred_random_faults_are_named_exactly(search):
    trials = [search(seed, 1) for seed in range(1000, 1200)]
    trials += [search(seed, 2) for seed in range(1000, 1100)]

    misses = [story for exact, story in trials if not exact]

    assert len(misses) <= len(trials) // 100, misses
