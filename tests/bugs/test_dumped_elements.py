"""From the verdict to the element: tensors that were kept whole are compared one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from click.testing import CliRunner

from tests.bugs.faults import FlippedOperator
from tests.bugs.training import record
from upguard_plugin.cli import upguard
from upguard_plugin.trace.reader import open_trace

SMALL = {"num_layers": 1, "width": 16, "num_heads": 2, "vocabulary": 32, "length": 8}
DUMP = {"boundary": "blocks.0.mlp.fc1*", "steps": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = {"level": "op", "config": {"dump": DUMP}, **SMALL}
    # A step has 5 addmm; the third is that of fc1.
    flip = partial(FlippedOperator, "aten.addmm.", 5 + 2, acts=True)
    return record(folder / "baseline", **options), record(folder / "target", mode=flip, **options)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(upguard, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 1), result.output
    return result.output


def test_the_verdict_names_the_command_that_shows_the_element(runs):
    command = f"upguard show --diff {runs[0]} {runs[1]} --event "
    event = '"step 1 forward blocks.0.mlp.fc1 aten.addmm call 0 output out"'
    assert f"    elements   {command}{event}\n" in run("compare", *runs)

    shown = run("show", "--diff", *runs, "--event", event.strip('"')).splitlines()

    assert shown[:3] == [
        "step 1, rank 0, forward: blocks.0.mlp.fc1, operator aten.addmm, call 0",
        "    tensor     output out, float32 [32, 64]",
        "    elements   1 of 2048 differ",
    ]
    assert shown[3] == "    pattern    one element"
    assert shown[6] == "    ulps       1: 1"


def test_only_what_was_asked_for_is_kept(runs):
    trace = open_trace(runs[0])
    assert not trace.has_tensors(0, "step0")
    kept = trace.read_tensors(0, "step1")
    batch = trace.read(0, 1)
    names = {batch.key_of(row).boundary for row in range(len(batch)) if str(batch.seq[row]) in kept}
    assert names == {"blocks.0.mlp.fc1", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias"}


def test_equal_tensors_are_said_to_be_equal(runs):
    shown = run("show", "--diff", *runs, "--event", "step 1 start blocks.0.mlp.fc1.bias param")
    assert shown.splitlines()[-1] == "    elements   all 64 are equal, bit by bit"


def refused(*arguments: object) -> list[str]:
    result = CliRunner().invoke(upguard, [str(argument) for argument in ("show", *arguments)])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr.splitlines()


def test_an_event_that_names_no_kept_tensor_is_refused_with_those_that_there_are(runs, tmp_path):
    report = tmp_path / "report"

    lines = refused("--diff", *runs, "--event", "step 1 haed output", "--output", report)

    assert lines == [
        "no event that was chosen has its whole tensor in both runs",
        "  steps  1",
        "  names  blocks.0.mlp.fc1, blocks.0.mlp.fc1.bias, blocks.0.mlp.fc1.weight "
        "(of step 1, rank 0)",
        "  try    name one of these: --event 'step 1 blocks.0.mlp.fc1'",
    ]
    assert refused("--diff", *runs, "--steps", "0", "--format", "json") == lines
    assert not report.exists()


def test_runs_without_kept_tensors_say_which(runs, tmp_path):
    none = record(tmp_path / "none", **SMALL)
    other = record(tmp_path / "other", config={"dump": DUMP | {"steps": "0"}}, **SMALL)

    assert refused("--diff", runs[0], none) == [
        f"the target {none} has no whole tensors",
        "  try  record both runs with the setting dump",
    ]
    assert refused("--diff", runs[0], other) == [
        "the runs have whole tensors of no step in common",
        "  baseline  steps 1",
        "  target    steps 0",
        "  try       record both with the same dump",
    ]


def test_the_verdict_says_nothing_of_tensors_that_were_not_kept(tmp_path, runs):
    flip = partial(FlippedOperator, "aten.addmm.", 5 + 2, acts=True)
    other = record(tmp_path / "other", level="op", mode=flip, **SMALL)
    assert "    elements " not in run("compare", runs[0], other)


def test_tensors_of_all_kinds_come_back_as_they_were():
    from upguard_plugin.capture.dumps import as_array

    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64):
        tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
        array = as_array(tensor)
        assert array.tobytes() == bytes(tensor.contiguous().untyped_storage())
