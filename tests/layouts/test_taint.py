"""What rounds differently in another layout is told from what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.cases.case import verdict_of
from tests.compare.teams import together
from tests.layouts.rounding_model import Job, train, train_on_two
from upguard_plugin.cli import upguard
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.trace.reader import open_trace

PLAIN = Job("plain")
OTHERS = (
    Job("bf16", dtype=torch.bfloat16),
    Job("unsketched", sketch=False),
    *(Job(f"seed-{seed}", seed=seed) for seed in (1, 2)),
)
HALVED = Job("halved", num_microbatches=2)
FAULTS = ("unreduced", "bias twice", "last bit", "nan")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two folders: each training on one rank, and on two; the faults on two only."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    for job in (PLAIN, *OTHERS):
        train(job, one)
    for job in (HALVED, replace(PLAIN, name="last bit", fault="last bit")):
        train(job, one)
    train_on_two(
        [
            PLAIN,
            *OTHERS,
            HALVED,
            Job("longer", num_steps=3, weights=9),
            *(replace(PLAIN, name=f, fault=f) for f in FAULTS),
        ],
        two,
    )
    return one, two


def verdict_on(runs, baseline: str, target: str):
    return verdict_of(runs[0] / baseline, runs[1] / target)


@pytest.mark.parametrize("name", ["plain", "bf16", "seed-1", "seed-2"])
def test_clean_runs_are_identical_but_for_rounding(runs, name):
    verdict = verdict_on(runs, name, name)

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    tainted = verdict["tainted"]
    assert (tainted["from"]["step"], tainted["from"]["boundary"]) == (0, "blocks.0.down")
    assert tainted["boundaries"] == verdict["coverage"]["tainted"] > 40
    assert 0 < tainted["largest_in_eps"] < 100
    # Whatever lies before the first sum in another order is equal.
    assert verdict["certified"]["events"] > 40


@pytest.mark.parametrize("name", ["plain", "unreduced", "nan"])
def test_several_processes_measure_the_same_distances(runs, name):
    baseline, target = open_trace(runs[0] / "plain"), open_trace(runs[1] / name)

    alone = compare_runs(baseline, target)

    assert alone.tainted is not None
    for size in (2, 3):
        assert together(size, baseline, target) == [alone] * size


@pytest.mark.parametrize("fault", ["unreduced", "bias twice", "nan"])
def test_a_fault_in_the_region_is_named(runs, fault):
    verdict = verdict_on(runs, "plain", fault)

    first = verdict["first_divergence"]
    assert (first["step"], first["phase"], first["boundary"], first["role"], first["kind"]) == (
        1, "forward", "blocks.1", "output", "forward",
    )  # fmt: skip
    assert first["inputs_equal"] is None
    assert "by more than rounding explains" in first["explanation"]
    assert verdict["tainted"]["boundaries"] > 40


def test_a_bit_that_differs_before_any_sum_is_no_rounding(runs):
    verdict = verdict_on(runs, "plain", "last bit")

    first = verdict["first_divergence"]
    assert (first["step"], first["boundary"], first["role"]) == (0, "blocks.0.up", "output")
    assert first["distance"]["in_eps"] < 1
    assert verdict["tainted"] is None


def test_noise_is_left_out_before_rounding_is_told_from_faults(runs):
    repeat = str(runs[0] / "last bit")
    arguments = ["compare", str(runs[0] / "plain"), "--noise", repeat]

    clean = CliRunner().invoke(upguard, [*arguments, str(runs[1] / "last bit")])
    faulty = CliRunner().invoke(upguard, [*arguments, str(runs[1] / "unreduced")])

    assert clean.exit_code == 0, clean.output
    assert "noise: from step 0 on a repeat of the baseline differs in blocks.0.up output 0" in (
        clean.output
    )
    assert faulty.output.startswith("DIVERGENT at step 1, ")


def test_without_sketches_the_region_is_not_comparable(runs):
    folders = [str(folder / "unsketched") for folder in runs]

    result = CliRunner().invoke(upguard, ["compare", *folders])

    assert result.exit_code == 3, result.output
    first = result.output.splitlines()[0]
    assert first.startswith("INCOMPARABLE: ")
    assert first.endswith(
        "events not comparable: they lie behind a sum that the layouts take in another order, and "
        "without sketches nothing tells rounding from a fault: record both runs with sketch: true"
    )


def test_other_micro_batches_round_gradients_and_nothing_before(runs):
    verdict = verdict_of(runs[0] / "plain", runs[0] / "halved")

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    first = verdict["tainted"]["from"]
    assert (first["step"], first["role"]) == (0, "grad")
    assert any("into other micro-batches" in note for note in verdict["notes"])


def test_other_micro_batches_in_another_layout_are_identical_but_for_rounding(runs):
    verdict = verdict_on(runs, "plain", "halved")

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    assert verdict["tainted"]["boundaries"] > 20


def test_other_weights_are_no_rounding_and_no_later_step_is_taken_for_the_first(runs):
    verdict = verdict_on(runs, "plain", "longer")

    first = verdict["first_divergence"]
    assert (first["step"], first["phase"], first["role"], first["kind"]) == (
        0, "start", "param", "init",
    )  # fmt: skip
    assert verdict["tainted"] is None


def test_the_report_says_where_the_region_begins_and_how_far_it_goes(runs):
    folders = [str(folder / "plain") for folder in runs]

    result = CliRunner().invoke(upguard, ["compare", *folders])

    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("IDENTICAL but for rounding: ")
    assert lines[1].startswith("  tainted    from blocks.0.down output 0 (step 0, ")
    assert " events differ by rounding, by at most " in lines[1]
    assert any(line.startswith("  note       rounding: farthest apart are ") for line in lines)
