"""Whole reports of `upguard check` against text."""

from __future__ import annotations

import json

from tests.memory_run import MemoryRun, batch, edited, events, hash_of, written
from upguard_plugin.cli import main
from upguard_plugin.records import Axis, Layout

STEP = """
    start     -  param   fc.weight/value   w     at=*
    grad_sync -  output  all_reduce[dp]/0  g     op=all_reduce_sum moment=completion group=0,1:0
    grad_sync -  grad    fc.weight/grad    g     at=*
    optimizer -  param   fc.weight/value   w1    at=*
"""
FAULTY = edited(STEP, ("grad    g ", "grad    g2"), ("w1    at", "w2    at"))


def run(tmp_path, name: str, *ranks: str, **settings):
    made = MemoryRun(
        {rank: [batch(0, events(text))] for rank, text in enumerate(ranks)},
        name,
        layouts={r: Layout((Axis("dp", 2, r, (0, 1)),)) for r in range(len(ranks))},
        **settings,
    )
    return str(written(made, tmp_path / name))


def check(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["check", *arguments])
    return code, capsys.readouterr().out


def test_what_broke_comes_first(tmp_path, capsys):
    code, out = check(capsys, run(tmp_path, "faulty", STEP, FAULTY))

    assert code == 1
    assert out.splitlines() == [
        "BROKEN at step 0, grad_sync: replicas-agree",
        "    boundary   fc.weight",
        "    tensor     grad grad",
        "    ranks      0, 1",
        "    why        Gradient of fc.weight must be the same on ranks 0, 1, "
        "but ranks 0, 1 differ.",
        f"    rank 0     {hash_of('g'):016x} float32 [4, 8]",
        f"    rank 1     {hash_of('g2'):016x} float32 [4, 8]",
        "  also       step 0, optimizer: fc.weight param value (replicas-agree, ranks 0, 1)",
        "  checked    3 replicas-agree, 1 collectives-match, 1 outputs-agree",
        "  never      19 invariants (--verbose: which): nothing that it applies to was recorded",
        "             sums-conserved: a buffer of the collective was not recorded",
        "             outputs-awaited: level op alone sees who uses an output",
        "  skipped    3 checks that could not be made (--verbose: why)",
    ]


def test_a_run_without_a_break_says_so_in_one_line(tmp_path, capsys):
    code, out = check(capsys, run(tmp_path, "clean", STEP, STEP))

    assert code == 0
    assert out.startswith("UNBROKEN: 5 checks of 8 events, 1 step of 2 ranks\n")


def test_a_missing_rank_leaves_it_undecided(tmp_path, capsys):
    code, out = check(capsys, run(tmp_path, "part", STEP, STEP, missing=(2,)))

    assert code == 3
    assert out.startswith(
        "UNDECIDED: missing ranks: 2 (found 0, 1); copy the missing files, or name the ranks to "
        "check: --ranks 0,1\n"
    )


def test_json_says_the_same(tmp_path, capsys):
    code, out = check(capsys, run(tmp_path, "faulty", STEP, FAULTY), "--format", "json")
    report = json.loads(out)

    assert (code, report["schema"], report["answer"]) == (1, "upguard.check/1", "broken")
    assert [one["role"] for one in report["broken"]] == ["grad", "param"]
    assert "received-is-sent" in report["never_applied"]
    told = [name for names in report["why_never"].values() for name in names]
    assert sorted(report["never_applied"]) == sorted(told)


def test_why_invariants_were_never_applied_is_one_line_a_reason(tmp_path, capsys):
    path = str(written(MemoryRun({0: [batch(0, events(STEP))]}, "alone"), tmp_path / "alone"))

    short, whole = (
        next(line for line in check(capsys, path, *flags)[1].splitlines() if "one rank was" in line)
        for flags in ([], ["--verbose"])
    )

    why = "it compares ranks, and one rank was recorded"
    assert short == f"  never      10 invariants (--verbose: which): {why}"
    assert whole.startswith("  never      parts-differ, outputs-agree, received-is-sent, ")
    assert whole.endswith(f", streams-differ: {why}")


def test_filters_say_what_is_reported(tmp_path, capsys):
    path = run(tmp_path, "faulty", STEP, FAULTY)

    assert check(capsys, path, "--roles", "output", "--quiet") == (0, "")
    assert check(capsys, path, "--roles", "param")[0] == 1
    assert check(capsys, path, "--modules", "head")[0] == 3


def test_what_is_no_run_gives_one_sentence(tmp_path, capsys):
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert "no such run" in capsys.readouterr().err
