"""Megatron with tensor parallelism at level `op`: same weights, and repeats are identical."""

from __future__ import annotations

import pytest

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.launch.demo.jobs import Job
from upguard_plugin.launch.demo.ranks import train
from upguard_plugin.trace.reader import open_trace

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

LAYOUT = "tp2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two run directories, and what both ranks say of an unrecorded training and of these two."""
    runs = [tmp_path_factory.mktemp("runs") / name for name in ("baseline", "target")]
    jobs = [Job("none", LAYOUT), *(Job("none", LAYOUT, str(run), "op") for run in runs)]
    return runs, train(jobs, tmp_path_factory.mktemp("ranks"))


def test_recording_every_operator_keeps_the_bits(trained):
    plain, *recorded = ([rank.weights for rank in ranks] for ranks in trained[1])
    assert recorded == [plain, plain]


def test_two_equal_trainings_are_identical_and_complete(trained):
    traces = [open_trace(run) for run in trained[0]]
    assert all(trace.end(rank).complete for trace in traces for rank in (0, 1))
    verdict = compare_runs(*traces)
    assert verdict.verdict == "identical", verdict.first_divergence


def test_operators_carry_the_names_of_megatrons_modules(trained):
    batch = open_trace(trained[0][0]).read(0, 1)
    keys = [batch.key_of(row) for row in range(len(batch))]
    operators = {(key.phase, key.boundary) for key in keys if (key.operator or "").count(".")}
    assert any(phase == "forward" and name.endswith("linear_fc1") for phase, name in operators)
    assert any(phase == "backward" and name.endswith("linear_fc1") for phase, name in operators)
    assert any((key.operator or "").startswith("autograd.") for key in keys)
