"""A program that seeds torch but not Python's `random` starts each run with another state of it."""

from __future__ import annotations

import random

from tests.bugs.training import compare, found, record

SMALL = {"num_layers": 1, "width": 16, "num_heads": 2, "vocabulary": 32, "length": 8}


def seed_otherwise(model, optimizer, step):
    if step == 0:
        random.seed(99)


def test_a_generator_that_nobody_draws_from_is_no_difference(tmp_path):
    baseline = record(tmp_path / "baseline", **SMALL)
    target = record(tmp_path / "target", before_step=seed_otherwise, **SMALL)

    verdict = compare(baseline, target)

    assert verdict["verdict"] == "identical"
    assert any("rng.python differs from step 0 on" in note for note in verdict["notes"])


def test_it_counts_from_the_step_in_which_somebody_draws(tmp_path):
    def draw(model, optimizer, step):
        if step == 2:
            random.random()

    baseline = record(tmp_path / "baseline", after_update=draw, **SMALL)
    target = record(tmp_path / "target", before_step=seed_otherwise, after_update=draw, **SMALL)

    verdict = compare(baseline, target)

    assert found(verdict, "step", "boundary", "kind") == (2, "rng.python", "rng")
