"""One corrupted result of any operator of the GPT: level `op` names exactly that operator."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.bugs.faults import CorruptedCalls
from tests.bugs.flipped_runs import (
    TRAINING,
    Flips,
    Result,
    corruption,
    drawn,
    flipped,
    independent,
    named_by,
    results_of,
)
from tests.bugs.training import NUM_STEPS, compare, record

NUM_FLIPS = 30
NUM_ROUNDS = 7  # of NUM_FLIPS corruptions each: a little over 200
MANY = ("two", "strided", "row", "sign")
ALL = ("bit", *MANY)


@dataclass(frozen=True)
class Variant:
    """The GPT recorded or trained otherwise, and the phases and steps to corrupt."""

    options: dict[str, Any]
    phases: frozenset[str]
    num: int  # of steps, by default


OPTIMIZER = frozenset({"optimizer"})
VARIANTS = {
    "outputs": Variant({"config": {"roles": "output"}}, TRAINING, 20),
    "foreach": Variant({"adamw": {"foreach": True}}, OPTIMIZER, 10),
    "fused": Variant({"adamw": {"fused": True}}, OPTIMIZER, 10),
    "dropout": Variant({"dropout": 0.1}, frozenset({"forward"}), 5),
}


# Pairs of runs, of which one has a single flipped bit


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> tuple[Path, list[Result]]:
    run = record(tmp_path_factory.mktemp("clean") / "clean", level="op")
    return run, results_of(run)


def of_seed(results: list[Result], seed: int) -> Result:
    return drawn(results, random.Random(seed), "bit")


def blamed(clean: tuple[Path, list[Result]], output: Path, seed: int) -> tuple[Any, Any]:
    """Flip a bit in a run: its place, and the place that the verdict names."""
    chosen = of_seed(clean[1], seed)
    mode = partial(CorruptedCalls, [corruption(chosen, "bit")], random.Random(seed))
    faulty = record(output, level="op", mode=mode)
    named = named_by(clean[0], faulty)
    shutil.rmtree(faulty)
    return chosen.place, named


@pytest.mark.parametrize("seed", range(NUM_FLIPS))
def test_a_flipped_bit_is_blamed_on_its_operator(clean, tmp_path, seed):
    place, named = blamed(clean, tmp_path / "faulty", seed)
    assert named == place


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_FLIPS, 200))
def test_200_flipped_bits_are_blamed_on_their_operators(clean, tmp_path, seed):
    place, named = blamed(clean, tmp_path / "faulty", seed)
    assert named == place


def test_flips_are_drawn_from_all_phases_steps_and_many_operators(clean):
    flips = [of_seed(clean[1], seed) for seed in range(NUM_FLIPS)]
    assert {flip.key.phase for flip in flips} == TRAINING
    assert {flip.step for flip in flips} == set(range(NUM_STEPS))
    assert len({flip.key.operator for flip in flips}) >= 15
    assert () in {flip.key.shape for flip in flips}
    assert {None, "after"} == {flip.key.moment for flip in flips}


@pytest.mark.parametrize("repeat", range(10))
def test_two_identical_runs_are_identical(clean, tmp_path, repeat):
    again = record(tmp_path / "again", level="op")
    assert compare(clean[0], again)["verdict"] == "identical"


@pytest.mark.long
def test_50_identical_pairs_are_identical(tmp_path):
    """One after the other."""
    before = record(tmp_path / "run0", level="op")
    for number in range(1, 51):
        again = record(tmp_path / f"run{number}", level="op")
        assert compare(before, again)["verdict"] == "identical", number
        shutil.rmtree(before)
        before = again


def weights_after(output: Path, **config: Any) -> list[bytes]:
    kept: list[bytes] = []

    def keep(model: nn.Module, optimizer: object, step: int) -> None:
        if step == NUM_STEPS - 1:
            kept.extend(p.detach().numpy().tobytes() for p in model.parameters())

    record(output, level="op", config=config, after_update=keep)
    return kept


def test_the_weights_keep_their_bits(tmp_path):
    plain = weights_after(tmp_path / "off", enabled=False)
    assert not (tmp_path / "off").exists()
    assert weights_after(tmp_path / "whole") == plain
    assert weights_after(tmp_path / "outputs", roles="output") == plain


# Runs of independent steps, with a corruption in each step


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> tuple[Path, list[Result]]:
    run = independent(tmp_path_factory.mktemp("steps") / "steps", NUM_FLIPS)
    return run, results_of(run)


def assert_all_named(clean: Path, flips: Flips) -> None:
    assert flips.missed(clean) == []
    assert named_by(clean, flips.run) == flips.expected[1].place


@pytest.mark.parametrize("how", MANY)
def test_corrupted_elements_are_blamed_on_their_operators(steps, tmp_path, how):
    run, results = steps
    assert_all_named(run, flipped(tmp_path / f"{how}0", results, (how,)))


@pytest.mark.long
@pytest.mark.parametrize("how", MANY)
@pytest.mark.parametrize("number", range(1, NUM_ROUNDS))
def test_200_corruptions_are_blamed_on_their_operators(steps, tmp_path, number, how):
    run, results = steps
    assert_all_named(run, flipped(tmp_path / f"{how}{number}", results, (how,)))


def corrupt_variant(name: str, folder: Path, num: int, rounds: range) -> None:
    variant = VARIANTS[name]
    run = independent(folder / "clean", num, **variant.options)
    results = [one for one in results_of(run) if one.key.phase in variant.phases]
    for number in rounds:
        assert_all_named(run, flipped(folder / f"{name}{number}", results, ALL, **variant.options))


@pytest.mark.parametrize("name", VARIANTS)
def test_corruptions_in_another_setting_are_blamed_on_their_operators(tmp_path, name):
    corrupt_variant(name, tmp_path, VARIANTS[name].num, range(1))


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_180_corruptions_in_another_setting_are_blamed_on_their_operators(tmp_path, name):
    corrupt_variant(name, tmp_path, NUM_FLIPS, range(1, NUM_ROUNDS))
