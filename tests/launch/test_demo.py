"""`upguard demo`: every fault is found where it was planted, and nothing where nothing was."""

from __future__ import annotations

import json
import sys

import pytest

from upguard_plugin.cli import main
from upguard_plugin.launch.demo.faults import FAULTS
from upguard_plugin.launch.demo.jobs import Job
from upguard_plugin.launch.demo.ranks import train


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What `upguard demo --fault all --format json` prints, by fault."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("click.echo", lambda line, err=False: err or printed.append(line))
        code = main(["demo", "--fault", "all", "--format", "json", "--output", str(folder)])
    return {"exit code": code} | {e["fault"]: e for e in json.loads("\n".join(printed))}


@pytest.mark.megatron
def test_the_demo_ends_well_if_every_answer_is_right(answers):
    assert answers["exit code"] == 0


@pytest.mark.megatron
def test_two_runs_without_a_fault_are_identical(answers):
    assert answers["none"] == {"fault": "none", "expected": None, "found": None}


@pytest.mark.megatron
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_fault_is_found_where_it_was_planted(answers, fault):
    entry = answers[fault]

    found = {key: entry["found"][key] for key in ("step", "boundary", "kind")}
    assert found == entry["expected"]


@pytest.mark.megatron
def test_a_flipped_bit_is_blamed_on_the_rank_that_has_it(answers):
    found = answers["flipped-bit"]["found"]

    assert (found["ranks"], found["microbatch"], found["phase"]) == ([1], 0, "forward")
    assert found["inputs_equal"] is True


@pytest.mark.megatron
def test_a_token_is_found_in_its_micro_batch(answers):
    assert answers["token"]["found"]["microbatch"] == 1
    assert answers["swapped-microbatches"]["found"]["microbatch"] == 0


def test_list_names_every_fault(capsys):
    assert main(["demo", "--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FAULTS)


def test_an_unknown_fault_is_refused_with_the_nearest(capsys):
    assert main(["demo", "--fault", "flipped"]) == 2

    assert capsys.readouterr().err == (
        "there is no fault 'flipped'\n"
        f"  faults  {', '.join([*FAULTS, 'all'])}\n"
        "  try     --fault flipped-bit\n"
    )


def test_without_megatron_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)

    assert main(["demo"]) == 2

    assert capsys.readouterr().err == (
        "upguard demo trains a Megatron-Core model, and megatron-core is not installed\n"
        "  try  pip install 'upguard-plugin[megatron]'\n"
    )


@pytest.mark.megatron
def test_a_folder_with_files_is_refused(tmp_path, capsys):
    pytest.importorskip("megatron.core")
    (tmp_path / "notes.txt").touch()

    assert main(["demo", "--output", str(tmp_path)]) == 2

    assert capsys.readouterr().err == (
        f"cannot write the demo's runs to {tmp_path}: it holds files already\n"
        "  try  give a folder that is new or empty\n"
    )


def test_a_rank_that_dies_ends_the_demo_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(Exception, match="training failed on rank 0") as error:
        train([Job("none", "tp2")], tmp_path)

    assert error.value.evidence == {"exit": 1, "said": "nothing", "log": tmp_path / "rank-0.log"}
