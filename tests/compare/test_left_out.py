"""Noise, ignore rules and renaming rules."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory_run import MemoryRun, edited, run, written
from tests.toy_training import flip, train
from upguard_plugin.cli import main
from upguard_plugin.compare.ignoring import IgnoreRule, read_ignore_rules
from upguard_plugin.compare.renaming import RenamedRun, RenameRule, read_rename_rules
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import IncomparableError, UsageError

STEP = """
start     -  param   fc.weight/value        w
forward   0  input   fc/args.0              x
forward   0  output  fc/out                 y       Linear
forward   0  output  timer/out              t       Timer
forward   0  output  head/out               z       Linear
"""


def noisy(value: str, *changes) -> str:
    return edited(STEP, (" t ", f" {value} "), *changes)


def test_what_differs_in_a_repeat_is_left_out_and_listed():
    baseline, repeat = run(STEP, name="a"), run(noisy("t1"), name="b")

    verdict = compare_runs(baseline, run(noisy("t2"), name="c"), noise=[repeat])

    assert (verdict.verdict, verdict.coverage.noise, verdict.coverage.differ) == ("identical", 1, 0)
    assert "noise: from step 0 on a repeat of the baseline differs in timer output out" in (
        verdict.notes
    )
    assert compare_runs(baseline, run(noisy("t2"), name="c")).verdict == "divergent"


def test_a_fault_is_found_in_spite_of_noise_before_it():
    target = run(noisy("t2", (" z ", " z2 ")), name="c")

    verdict = compare_runs(run(STEP), target, noise=[run(noisy("t1"), name="b")])

    assert verdict.verdict == "divergent"
    assert verdict.first_divergence.boundary == "head"


def test_noise_hides_nothing_before_the_step_in_which_it_begins():
    baseline = run(STEP, STEP, STEP)
    repeat = run(STEP, noisy("t1"), STEP, name="b")

    early = compare_runs(baseline, run(noisy("t2"), STEP, STEP, name="c"), noise=[repeat])
    late = compare_runs(baseline, run(STEP, STEP, noisy("t2"), name="c"), noise=[repeat])

    assert (early.verdict, early.first_divergence.step) == ("divergent", 0)
    assert (late.verdict, late.coverage.noise) == ("identical", 1)


def test_two_repeats_hide_what_either_shows():
    baseline, repeats = run(STEP), [run(STEP, name="b"), run(noisy("t1"), name="c")]

    assert compare_runs(baseline, run(noisy("t2"), name="d"), noise=repeats).verdict == "identical"
    assert compare_runs(baseline, run(noisy("t2"), name="d"), noise=repeats[:1]).exit_code == 1


def test_an_event_that_only_a_repeat_has_is_noise_too():
    extra = STEP + "forward   0  output  extra/out    e       Linear\n"

    verdict = compare_runs(run(STEP), run(extra, name="c"), noise=[run(extra, name="b")])

    assert (verdict.verdict, verdict.coverage.noise) == ("identical", 1)
    assert compare_runs(run(STEP), run(extra, name="c")).verdict == "divergent"


def test_a_comparison_of_nothing_but_noise_is_not_identical():
    other = "\n".join(f"{line} " for line in STEP.splitlines() if "forward" in line)
    changed = other.replace(" x ", " x1 ").replace(" y ", " y1 ").replace(" t ", " t1 ")
    changed = changed.replace(" z ", " z1 ")

    verdict = compare_runs(run(other), run(changed, name="c"), noise=[run(changed, name="b")])

    assert verdict.verdict == "incomparable"
    assert verdict.notes[0] == "nothing was compared: all that both runs have is noise"


def test_a_run_of_another_size_is_no_repeat():
    with pytest.raises(IncomparableError, match="is no repeat of the baseline: the layouts differ"):
        compare_runs(train(num_steps=1), train(num_steps=1), noise=[train(num_steps=1, world=2)])


def test_noise_on_one_rank_hides_nothing_on_another():
    settings = {"world": 2, "num_steps": 1}
    repeat = train(**settings, name="b", fault=flip("0/0/forward/head/output", rank=1))
    same = train(**settings, name="c", fault=flip("0/0/forward/head/output", rank=1))
    other = train(**settings, name="d", fault=flip("0/0/forward/head/output", rank=0))

    assert compare_runs(train(**settings), same, noise=[repeat]).verdict == "identical"
    found = compare_runs(train(**settings), other, noise=[repeat]).first_divergence
    assert (found.boundary, found.ranks) == ("head", [0])


def test_an_ignore_rule_leaves_out_counts_and_says_why():
    rules = (
        IgnoreRule(("time*",), ("output",), "a clock"),
        IgnoreRule(("fc",), (), "a copy"),
        IgnoreRule(("nowhere",), (), "old"),
    )
    target = run(noisy("t2"), name="c")

    verdict = compare_runs(run(STEP), target, Selection(ignore=rules))

    assert (verdict.verdict, verdict.coverage.filtered) == ("identical", 4)
    assert verdict.notes[1:] == [
        "ignored: 1 events of time* (output): a clock",
        "ignored: 3 events of fc: a copy",
        "ignored: 0 events of nowhere: old",
    ]
    kept = compare_runs(run(STEP), target, Selection(ignore=rules[1:]))
    assert kept.first_divergence.boundary == "timer"


BAD = {
    "ignore: [": "it is not YAML (line 1)",
    "- a": "it is not a list of rules under the name 'ignore'",
    "rename: []": "it is not a list of rules under the name 'ignore'",
    "ignore:\n- fc": "rule 1 is not a list of fields (boundaries, roles, reason)",
    "ignore:\n- {boundaries: fc}": "rule 1 has no reason",
    "ignore:\n- {boundaries: fc, reason: }": "reason of rule 1 is no text and no list of texts",
    "ignore:\n- {boundaries: 3, reason: a}": (
        "boundaries of rule 1 is no text and no list of texts"
    ),
    "ignore:\n- {boundary: fc, reason: a}": (
        "the field names of rule 1 does not know 'boundary' (is 'boundaries' meant?)"
    ),
    "ignore:\n- {boundaries: fc, roles: outputs, reason: a}": (
        "roles of rule 1 does not know 'outputs' (is 'output' meant?)"
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_refused_with_one_sentence(text, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(text)

    with pytest.raises(UsageError) as caught:
        read_ignore_rules(path)
    assert caught.value.sentence == f"cannot use {path} for --ignore: {BAD[text]}"


@given(st.binary(max_size=60))
def test_no_bytes_crash_the_reading_of_rules(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    for read in (read_ignore_rules, read_rename_rules):
        with contextlib.suppress(UsageError):
            read(path)


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("ignore:\n- {boundaries: [a.*, b], roles: rng, reason: why not}\n")

    assert read_ignore_rules(path) == (IgnoreRule(("a.*", "b"), ("rng",), "why not"),)


@pytest.mark.parametrize(
    ("old", "new", "boundary", "expected"),
    [
        ("model", "net", "model", "net"),
        ("model", "net", "model.fc.weight", "net.fc.weight"),
        ("model", "net", "models.fc", None),
        ("h.*.attn", "layers.*.self_attn", "h.3.attn.qkv", "layers.3.self_attn.qkv"),
        ("h.*.attn", "layers.*.self_attn", "h.3.4.attn", None),
        ("*_norm.*", "norm*.*", "a_norm.weight", "norma.weight"),
    ],
)
def test_a_rule_renames_a_boundary_and_what_lies_below(old, new, boundary, expected):
    assert RenameRule(old, new).applied(boundary) == expected


def renamed(made: MemoryRun, old: str, new: str) -> RenamedRun:
    return RenamedRun(made, [RenameRule(old, new)])


def test_runs_of_other_names_are_identical_under_the_map():
    names = (("fc/args", "net.fc/args"), ("fc/out", "net.fc/out"), ("fc.weight", "net.fc.weight"))
    target = run(edited(STEP, *names), name="b")
    faulty = run(edited(STEP, *names, (" y ", " y2 ")), name="c")

    assert compare_runs(run(STEP), target).verdict != "identical"
    assert compare_runs(run(STEP), renamed(target, "net.fc", "fc")).verdict == "identical"
    assert compare_runs(run(STEP), renamed(faulty, "net.fc", "fc")).first_divergence.boundary == (
        "fc"
    )


def test_names_that_are_mapped_away_are_not_identical_though_the_digests_agree():
    verdict = compare_runs(run(STEP), renamed(run(STEP, name="b"), "head", "tail"))

    assert verdict.verdict == "divergent"
    assert verdict.first_divergence.kind == "structure"


def test_two_boundaries_of_one_name_are_refused():
    with pytest.raises(UsageError, match="give fc and head one name, fc"):
        compare_runs(run(STEP), renamed(run(STEP, name="b"), "head", "fc"))


def test_the_command_takes_all_three(tmp_path, capsys):
    (tmp_path / "map").write_text("rename:\n- {from: top, to: head}\n")
    (tmp_path / "ignore").write_text("ignore:\n- {boundaries: fc, reason: known}\n")
    runs = {
        "a": STEP,
        "b": noisy("t1"),
        "c": noisy("t2", (" y ", " y2 "), ("head/", "top/")),
    }
    paths = {
        name: str(written(run(text, name=name), tmp_path / name)) for name, text in runs.items()
    }
    options = ["--noise", paths["b"], "--ignore", str(tmp_path / "ignore")]

    code = main(["compare", paths["a"], paths["c"], *options, "--map", str(tmp_path / "map")])

    assert code == 0, capsys.readouterr().out
    assert "1 noise" in capsys.readouterr().out
    assert main(["compare", paths["a"], paths["c"], *options]) == 1
    capsys.readouterr()
    assert main(["compare", paths["a"], paths["c"], "--map", str(tmp_path / "ignore")]) == 2
    assert capsys.readouterr().err == (
        f"cannot use {tmp_path / 'ignore'} for --map: it is not a list of rules under the name "
        "'rename'\n  try  docs/comparing.md\n"
    )


def test_the_target_is_no_repeat_of_the_baseline():
    target = run(noisy("t2"), name="c")
    with pytest.raises(IncomparableError, match="it is the target itself"):
        compare_runs(run(STEP), target, noise=[target])
