"""Globs and rules that name nothing are said once each, on the command line, in text and JSON."""

from __future__ import annotations

import json

import pytest

from tests.compare.streams import two_ranks
from tests.memory_run import MemoryRun, batch, events, run, written
from upguard_plugin.cli import main
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.records import NEVER_FIRED
from upguard_plugin.trace.batch import RankEnd

ONE = """
forward   0  output  fc/out      y    Linear
forward   0  output  timer/out   {}   Timer
"""
OTHER = """
forward   0  output  head/out    z    Linear
"""


@pytest.fixture
def runs(tmp_path):
    """Two runs of two ranks, as two stages of a pipeline have them; the timers differ."""
    made = {name: two_ranks(ONE.format(name), OTHER, name=name) for name in ("a", "b")}
    return [str(written(made[name], tmp_path / name)) for name in made]


def notes(runs, tmp_path, capsys, *options, ignore="", renames="", code):
    (tmp_path / "ignore").write_text(f"ignore: [{ignore}]")
    (tmp_path / "map").write_text(f"rename: [{renames}]")
    files = ["--ignore", str(tmp_path / "ignore"), "--map", str(tmp_path / "map")]
    assert main(["compare", *runs, *files, *options, "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)["notes"]


def test_each_rule_that_names_nothing_is_said_and_no_other(runs, tmp_path, capsys):
    told = notes(
        runs, tmp_path, capsys, "--modules", "fc,haed,head,timer",
        ignore="{boundaries: [timer, timr], reason: a clock}, "
        "{boundaries: fc, roles: grad, reason: x}",
        renames="{from: fcc, to: fc}, {from: fc, to: fc}",
        code=0,
    )  # fmt: skip

    assert told[:4] == [
        "--modules haed names no boundary of either run",
        "--ignore: timr names no boundary of either run",
        "--ignore: fc (grad) names no boundary of either run",
        "--map: fcc names no boundary of the target",
    ]
    assert sum("names no boundary" in note for note in told) == 4


def test_rules_that_name_something_on_any_rank_of_either_run_are_not_said(runs, tmp_path, capsys):
    told = notes(
        runs, tmp_path, capsys, "--modules", "head,f*",
        ignore="{boundaries: [ti*], reason: a clock}",
        renames="{from: head, to: head}",
        code=0,
    )  # fmt: skip

    assert not any("names no boundary" in note for note in told)


def test_the_reason_of_an_undecided_comparison_stays_first(tmp_path, capsys):
    paths = [str(written(run(ONE.format(n), name=n), tmp_path / n)) for n in ("a", "b")]

    assert main(["compare", *paths, "--modules", "hed"]) == 3
    lines = capsys.readouterr().out.splitlines()

    assert lines[0].startswith("INCOMPARABLE: nothing in common")
    assert "  note       --modules hed names no boundary of either run" in lines


def test_a_setting_counts_as_idle_only_if_it_named_nothing_on_any_rank():
    """A glob for another stage's modules is no slip."""
    slip, other = f"{NEVER_FIRED}modules has 'haed'", f"{NEVER_FIRED}modules has 'head'"
    ends = {0: RankEnd(True, notes=(slip, other)), 1: RankEnd(True, notes=(slip,))}
    batches = {rank: [batch(0, events(OTHER))] for rank in (0, 1)}

    verdict = compare_runs(MemoryRun(batches, "a", ends), MemoryRun(batches, "b"))

    assert verdict.coverage.never_fired == 1
    assert f"baseline: {slip}" in verdict.notes
    assert f"baseline: {other}" not in verdict.notes


def test_the_first_line_says_that_something_was_ignored(runs, tmp_path, capsys):
    (tmp_path / "ignore").write_text("ignore: [{boundaries: timer, reason: a clock}]")

    assert main(["compare", *runs, "--ignore", str(tmp_path / "ignore")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "IDENTICAL but for what is ignored: 2 events are equal, bit by bit; 1 is ignored"
    )


def test_the_first_line_says_that_something_is_noise(runs, tmp_path, capsys):
    repeat = written(two_ranks(ONE.format("c"), OTHER, name="c"), tmp_path / "c")

    assert main(["compare", *runs, "--noise", str(repeat)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "IDENTICAL but for noise: 2 events are equal, bit by bit; 1 is noise"
    )
