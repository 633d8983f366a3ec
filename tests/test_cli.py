from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.memory_run import RankEnd, written
from tests.toy_training import flip, train
from upguard_plugin.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A baseline, its twin, a target with a fault on rank 1, and one that was killed."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {"world": 2, "num_steps": 2, "collectives": True}
    killed = train(**settings, name="killed")
    killed._ends = {1: RankEnd(False, "disk full")}
    faulty = train(**settings, name="faulty", fault=flip("1/0/forward/head/output", rank=1))
    for run in (train(**settings), train(**settings, name="twin"), faulty, killed):
        written(run, folder / run.manifest.run_id)
    return folder


def upguard(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_equal_runs_are_identical(runs, capsys):
    code, out, err = upguard(capsys, "compare", runs / "run", runs / "twin")

    assert (code, err) == (0, "")
    assert out == (
        "IDENTICAL: 1288 events are equal, bit by bit\n"
        "  coverage   1288 compared, 0 differ, 0 unmatched\n"
        "  note       program: 'run' against 'twin'\n"
    )


def test_a_fault_is_printed_with_its_place(runs, capsys):
    code, out, err = upguard(capsys, "compare", runs / "run", runs / "faulty")

    assert (code, err) == (1, "")
    assert out.splitlines()[:6] == [
        "DIVERGENT at step 1, micro-batch 0, forward",
        "    boundary   head, operator Linear",
        "    tensor     output out, float32 [4, 8]",
        "    ranks      1 differs; 0 differs later",
        "    kind       forward: The output out of head differs although its inputs are equal.",
        "    inputs     equal, so this is the origin",
    ]


def test_json_says_the_same(runs, capsys):
    code, out, _ = upguard(capsys, "compare", runs / "run", runs / "faulty", "--format", "json")
    verdict = json.loads(out)

    assert (code, verdict["schema"], verdict["verdict"]) == (1, "upguard.verdict/1", "divergent")
    found = verdict["first_divergence"]
    assert (found["step"], found["boundary"], found["ranks"]) == (1, "head", [1])


def test_an_incomplete_run_is_not_called_identical(runs, capsys):
    code, out, _ = upguard(capsys, "compare", runs / "run", runs / "killed")

    assert code == 3
    assert out.startswith(
        "INCOMPARABLE: incomplete: rank 1 of the target ended early (disk full); "
        "what was compared ends after 2 steps\n"
    )
    assert upguard(capsys, "compare", runs / "run", runs / "killed", "--ranks", "0")[0] == 0
    assert upguard(capsys, "compare", runs / "run", runs / "killed", "--steps", "0-1")[0] == 0
    assert upguard(capsys, "compare", runs / "run", runs / "killed", "--steps", "0-")[0] == 3


def test_filters_leave_out_and_count(runs, capsys):
    code, out, _ = upguard(capsys, "compare", runs / "run", runs / "faulty", "--steps", "0")
    assert (code, "644 filtered out" in out) == (0, True)

    arguments = ("compare", runs / "run", runs / "faulty", "--roles", "grad", "--ranks", "1")
    code, out, _ = upguard(capsys, *arguments)
    assert (code, out.splitlines()[1].split()) == (1, ["boundary", "head.weight"])
    assert "inputs     not equal, but outside of what was compared" in out


@pytest.mark.parametrize("verb", [["compare", "{0}", "{0}"], ["show", "{0}"]])
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "no such run"),
        (lambda path: path.mkdir(), "the directory is empty"),
        (lambda path: path.write_text("x"), "a run is a directory"),
        (lambda path: (path.mkdir(), (path / "a.bin").write_bytes(b"a")), "not a run of UpGuard"),
    ],
)
def test_what_is_no_run_gives_one_sentence(tmp_path, capsys, verb, make, sentence):
    make(tmp_path / "run")

    code, out, err = upguard(capsys, *(word.format(tmp_path / "run") for word in verb))

    assert (code, out) == (2, "")
    assert err.startswith(f"cannot read {tmp_path / 'run'}: ") and sentence in err
    assert "Traceback" not in err


def test_a_damaged_run_gives_one_sentence(runs, tmp_path, capsys):
    whole = written(train(num_steps=1), tmp_path / "run")
    segment = next((whole / "rank00000").glob("*.arrow*"))
    for path in (whole / "rank00000").iterdir():
        if path.stat().st_size > segment.stat().st_size:
            segment = path
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)

    code, _, err = upguard(capsys, "compare", whole, whole, "--verify")

    assert (code, "Traceback" in err) == (2, False)
    assert err.startswith(f"cannot read {whole}")


def test_usage_errors_are_2(capsys):
    for arguments in ([], ["compare"], ["compre"], ["compare", "a", "b", "--steps", "x"]):
        code, _, err = upguard(capsys, *arguments)
        assert code == 2
        assert "Traceback" not in err


def test_reports_go_to_a_file_where_asked(runs, tmp_path, capsys):
    report = tmp_path / "verdict.json"
    arguments = ("compare", runs / "run", runs / "faulty", "--format", "json", "--output", report)

    assert upguard(capsys, *arguments) == (1, "", "")
    assert json.loads(report.read_text())["verdict"] == "divergent"
    code, _, err = upguard(capsys, *arguments[:-1], tmp_path / "no" / "where")
    assert (code, err.splitlines()[0]) == (
        2,
        f"cannot write the report to {tmp_path / 'no' / 'where'}: No such file or directory",
    )


def test_quiet_prints_nothing(runs, capsys):
    assert upguard(capsys, "compare", runs / "run", runs / "faulty", "--quiet") == (1, "", "")


def test_show_prints_a_table_of_what_was_asked_for(runs, capsys):
    code, out, _ = upguard(
        capsys, "show", runs / "run", "--modules", "head", "--steps", "1", "--ranks", "1",
        "--phase", "forward,loss", "--limit", "2",
    )  # fmt: skip

    lines = [line.split() for line in out.splitlines()]
    assert (code, len(lines)) == (0, 3)
    assert lines[0][:6] == ["step", "rank", "mb", "phase", "role", "boundary"]
    assert lines[1][:8] == ["1", "1", "0", "forward", "input", "head", "args.0", "0"]
    assert lines[2][:8] == ["1", "1", "0", "forward", "output", "head", "out", "0"]


def test_show_prints_one_json_object_a_line(runs, capsys):
    arguments = ("show", runs / "run", "--roles", "sample", "--format", "json")
    code, out, _ = upguard(capsys, *arguments)
    seen = [json.loads(line) for line in out.splitlines()]

    assert (code, len(seen)) == (0, 2 * 2 * 2)  # ranks, steps, micro-batches
    assert {event["boundary"] for event in seen} == {"input_ids"}


def test_show_refuses_what_was_not_recorded(runs, capsys):
    code, _, err = upguard(capsys, "show", runs / "run", "--steps", "7")

    assert (code, err.splitlines()[0]) == (2, f"{runs / 'run'} has nothing of --steps 7")


@pytest.mark.parametrize(("verb", "expected"), [("show", 2), ("check", 3)])
@pytest.mark.parametrize(
    ("option", "asked", "recorded"),
    [
        ("--steps", "7", "0 to 1"),
        ("--ranks", "4-", "0 to 1"),
        ("--modules", "haed,tail", "blocks.0, "),
    ],
)
def test_what_names_nothing_of_one_run_is_refused(
    runs, capsys, verb, expected, option, asked, recorded
):
    code, out, err = upguard(capsys, verb, runs / "run", option, asked)

    assert (code, out) == (expected, "")
    lines = err.splitlines()
    assert lines[0] == f"{runs / 'run'} has nothing of {option} {asked}"
    assert lines[1].startswith(f"  recorded  {recorded}")
    assert lines[2] == f"  try       name recorded ones with {option}"


def test_show_refuses_filters_that_no_event_passes(runs, capsys):
    assert upguard(capsys, "show", runs / "run", "--modules", "head", "--roles", "rng") == (
        2,
        "",
        f"{runs / 'run'} has no event that was asked for\n"
        f"  try  upguard show {runs / 'run'}, without --modules, --roles and --phase\n",
    )


def test_show_takes_an_event_with_diff_only(runs, capsys):
    code, _, err = upguard(capsys, "show", runs / "run", "--event", "step 1")

    assert (code, err.splitlines()[0]) == (2, "--event goes with --diff")


def test_a_run_without_ranks_names_none_to_try(runs, tmp_path, capsys):
    shutil.copytree(runs / "run", tmp_path / "half")
    for rank in (0, 1):
        shutil.rmtree(tmp_path / "half" / f"rank0000{rank}")

    for arguments in (("compare", runs / "run", tmp_path / "half"), ("check", tmp_path / "half")):
        code, out, _ = upguard(capsys, *arguments)
        assert code == 3
        assert out.splitlines()[0].endswith("0, 1 (found none); copy the missing files")


def test_every_verb_says_in_a_few_words_what_it_does(capsys):
    code, out, _ = upguard(capsys, "--help")

    assert code == 0
    assert "..." not in out.partition("Commands:")[2]


def test_a_closed_pipe_is_no_error(runs):
    code = (
        "import subprocess, sys\n"
        f"show = [sys.executable, '-m', 'upguard_plugin.cli', 'show', {str(runs / 'run')!r}]\n"
        "child = subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "child.stdout.readline(); child.stdout.close()\n"
        "assert child.stderr.read() == b'', child.stderr.read()\n"
        "assert child.wait() == 0, child.returncode\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
