"""One flipped bit in any operator's result: level `op` names exactly that operator."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.bugs.faults import FlippedCall
from tests.bugs.training import compare, found, record
from upguard_plugin.trace.reader import open_trace

SMALL = {"num_layers": 2, "width": 32, "num_heads": 2, "vocabulary": 64, "length": 16}
STEP = 1
NUM_FLIPS = 30


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return record(tmp_path_factory.mktemp("clean") / "clean", level="op", **SMALL)


def results_of(run: Path, step: int) -> list[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """(operator, its place, shape) for each operator call of a step with a result, in order."""
    batch = open_trace(run).read(0, step)
    calls: list[tuple[str, dict[str, Any], tuple[int, ...]]] = []
    last = None
    for row in range(len(batch)):
        key = batch.key_of(row)
        if key.role != "output" or not (key.operator or "").startswith("aten."):
            continue
        call = (key.operator, key.boundary, key.phase, int(batch.call[row]))
        if call != last:
            place = {"step": step, "boundary": key.boundary, "phase": key.phase,
                     "operator": key.operator, "call": int(batch.call[row])}  # fmt: skip
            calls.append((key.operator, place, key.shape))
        last = call
    return calls


def blamed(clean: Path, output: Path, seed: int, how: str) -> tuple[Any, Any]:
    """Corrupt one operator's result: its place, and the place that the verdict names."""
    draw = random.Random(f"{how} {seed}")
    calls = results_of(clean, STEP)
    chosen = draw.randrange(len(calls))
    while how == "sign" and not calls[chosen][2]:  # AdamW stops at a negative number of steps
        chosen = draw.randrange(len(calls))
    operator, place, _ = calls[chosen]
    earlier = [*results_of(clean, 0), *calls[:chosen]]
    nth = sum(name == operator for name, *_ in earlier)

    faulty = record(
        output, level="op", mode=partial(FlippedCall, operator, nth, draw, how), **SMALL
    )

    verdict = compare(clean, faulty)
    return place, dict(zip(place, found(verdict, *place), strict=True))


@pytest.mark.parametrize("repeat", range(3))
def test_two_identical_runs_are_identical(clean, tmp_path, repeat):
    again = record(tmp_path / "again", level="op", **SMALL)
    assert compare(clean, again)["verdict"] == "identical"


@pytest.mark.parametrize("seed", range(NUM_FLIPS))
def test_a_flipped_bit_is_blamed_on_its_operator(clean, tmp_path, seed):
    place, named = blamed(clean, tmp_path / "faulty", seed, "bit")
    assert named == place


@pytest.mark.parametrize("how", ["two", "strided", "row", "sign"])
@pytest.mark.parametrize("seed", range(2))
def test_a_corruption_of_many_elements_is_blamed_on_its_operator(clean, tmp_path, seed, how):
    place, named = blamed(clean, tmp_path / "faulty", seed, how)
    assert named == place


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_FLIPS, 200))
def test_200_flipped_bits_are_blamed_on_their_operators(clean, tmp_path, seed):
    place, named = blamed(clean, tmp_path / "faulty", seed, "bit")
    assert named == place


@pytest.mark.long
@pytest.mark.parametrize("how", ["two", "strided", "row", "sign"])
@pytest.mark.parametrize("seed", range(2, 25))
def test_100_corruptions_are_blamed_on_their_operators(clean, tmp_path, seed, how):
    place, named = blamed(clean, tmp_path / "faulty", seed, how)
    assert named == place


@pytest.mark.long
def test_50_identical_pairs_are_identical(tmp_path):
    """Of the whole GPT, one after the other."""
    before = record(tmp_path / "run0", level="op")
    for number in range(1, 51):
        again = record(tmp_path / f"run{number}", level="op")
        assert compare(before, again)["verdict"] == "identical", number
        shutil.rmtree(before)
        before = again
