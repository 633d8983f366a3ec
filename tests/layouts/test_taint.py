"""What rounds differently in another layout is told from what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.cases.case import verdict_of
from tests.layouts.rounding_model import Job, train, train_on_two
from upguard_plugin.cli import upguard

PLAIN = Job("plain")
OTHERS = (
    Job("bf16", dtype=torch.bfloat16),
    Job("unsketched", sketch=False),
    *(Job(f"seed-{seed}", seed=seed) for seed in (1, 2)),
)
FAULTS = ("unreduced", "bias twice", "last bit", "nan")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two folders: each training on one rank, and on two; the faults on two only."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    for job in (PLAIN, *OTHERS):
        train(job, one)
    train_on_two([PLAIN, *OTHERS, *(replace(PLAIN, name=f, fault=f) for f in FAULTS)], two)
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


def test_the_report_says_where_the_region_begins_and_how_far_it_goes(runs):
    folders = [str(folder / "plain") for folder in runs]

    result = CliRunner().invoke(upguard, ["compare", *folders])

    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("IDENTICAL but for rounding: ")
    assert lines[1].startswith("  tainted    from blocks.0.down output 0 (step 0, ")
    assert " events differ by rounding, by at most " in lines[1]
    assert any(line.startswith("  note       rounding: farthest apart are ") for line in lines)
