"""Placements that are added when runs are compared: what they can say, and what they cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.memory_run import MemoryRun, batch, edited, events, written
from upguard_plugin.cli import main
from upguard_plugin.compare.placing import PlacedRun, PlaceRule
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.errors import UsageError
from upguard_plugin.records import Axis, Layout

ONE_STEP = """
forward   0  input   router/args.0      x    [4,8]
forward   0  output  router/out         y    [4,2]
forward   0  output  fc/out             z    [4,6]
"""
PART_STEP = edited(ONE_STEP, ("[4,6]", "[4,3]"))
UNKNOWN = "no placement is known (a rule for --place or for enable says it)"


def ranks_of(*texts: str, tp: int = 1, cp: int = 1, sketches=None, name="run") -> MemoryRun:
    """A run of tp x cp ranks, tp counted first."""
    layouts = {}
    for rank in range(len(texts)):
        t, c = rank % tp, rank // tp
        of_tp = tuple(range(c * tp, (c + 1) * tp))
        of_cp = tuple(range(t, tp * cp, tp))
        layouts[rank] = Layout((Axis("tp", tp, t, of_tp), Axis("cp", cp, c, of_cp)))
    batches = {rank: [batch(0, events(text))] for rank, text in enumerate(texts)}
    for rank, numbers in (sketches or {}).items():
        columns = np.array([[float(n)] * 64 for n in numbers])
        batches[rank] = [replace(batches[rank][0], sketch=columns, nonfinite=np.zeros(3, np.int64))]
    return MemoryRun(batches, name, layouts=layouts)


def placed(baseline: MemoryRun, target: MemoryRun, *rules: tuple[str, str]):
    """The verdict with rules (boundary, placement)."""
    listed = [PlaceRule((name,), ("output", "input"), spec) for name, spec in rules]
    return compare_runs(PlacedRun(baseline, listed), PlacedRun(target, listed))


def reasons(verdict) -> str:
    return "\n".join(note for note in verdict.notes if note.startswith("not compared"))


ONE = ranks_of(ONE_STEP, name="one")
REPLICAS = [("router", "t h")]


def test_without_a_rule_nothing_is_taken_for_a_replica():
    verdict = compare_runs(ONE, ranks_of(PART_STEP, PART_STEP, tp=2))

    assert verdict.verdict == "incomparable"
    assert (verdict.coverage.compared, verdict.coverage.not_comparable) == (0, 3)
    assert UNKNOWN in reasons(verdict)


def test_a_replica_is_compared_once_a_rule_says_that_it_is_one():
    verdict = placed(ONE, ranks_of(PART_STEP, PART_STEP, tp=2), *REPLICAS)

    assert (verdict.verdict, verdict.coverage.compared) == ("identical", 2)
    assert f"not compared: 1 events, {UNKNOWN}: fc (output)" in verdict.notes


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one replica"])
def test_a_replica_that_differs_is_found(ranks):
    other = edited(PART_STEP, (" y ", " y2 "))
    texts = [other if rank in ranks else PART_STEP for rank in range(2)]

    verdict = placed(ONE, ranks_of(*texts, tp=2), *REPLICAS)

    assert verdict.verdict == "divergent"
    found = verdict.first_divergence
    assert (found.boundary, found.role, found.slot) == ("router", "output", "out")


def test_partial_sums_are_compared_by_their_sketches():
    summed = [("fc", "t h +tp"), *REPLICAS]
    texts = [edited(ONE_STEP, (" z ", f" z{rank} ")) for rank in range(2)]
    whole = ranks_of(ONE_STEP, sketches={0: (1, 1, 3)}, name="one")
    halves = ranks_of(*texts, tp=2, sketches={0: (1, 1, 1), 1: (1, 1, 2)})
    faulty = ranks_of(*texts, tp=2, sketches={0: (1, 1, 1), 1: (1, 1, 1)})

    clean, found = placed(whole, halves, *summed), placed(whole, faulty, *summed)

    assert (clean.verdict, clean.coverage.compared, clean.coverage.tainted) == ("identical", 3, 1)
    assert (found.verdict, found.first_divergence.boundary) == ("divergent", "fc")


def test_a_part_is_compared_with_the_same_part_of_a_run_that_is_cut_alike():
    texts = [edited(PART_STEP, (" z ", f" z{rank % 2} ")) for rank in range(4)]
    swapped = [edited(PART_STEP, (" z ", f" z{1 - rank % 2} ")) for rank in range(4)]
    rules = [("fc", "t o[tp]"), *REPLICAS]
    baseline = ranks_of(*texts[:2], tp=2, name="two")

    clean = placed(baseline, ranks_of(*texts, tp=2, cp=2), *rules)
    found = placed(baseline, ranks_of(*swapped, tp=2, cp=2), *rules)

    assert (clean.verdict, clean.coverage.compared) == ("identical", 4)
    assert found.verdict == "divergent"
    assert found.first_divergence.slot == "out (part 1 of 2 over tp)"


def test_a_part_is_not_compared_with_a_whole():
    verdict = placed(ONE, ranks_of(PART_STEP, PART_STEP, tp=2), ("fc", "t o[tp]"), *REPLICAS)

    assert verdict.verdict == "identical"
    assert verdict.coverage.compared == 2
    assert "record both runs with the placement" in reasons(verdict)
    assert (verdict.coverage.unmatched_baseline, verdict.coverage.unmatched_target) == (0, 0)


def test_a_rule_changes_nothing_of_what_has_a_placement():
    at = edited(ONE_STEP, ("[4,2]", "[4,2] at=recorded"))
    run = ranks_of(at, name="one")

    batch_read = PlacedRun(run, [PlaceRule(("router",), (), "t h")]).read(0, 0)

    specs = {key.slot: key.placement.spec for key in batch_read.keys if key.placement is not None}
    assert specs == {"args.0": "t h", "out": "recorded"}


def test_a_rule_that_does_not_fit_is_refused():
    sentence = "rule 1 of --place does not fit fc .output. of .*: it has 1 dims, the tensor has 2"
    with pytest.raises(UsageError, match=sentence):
        placed(ONE, ranks_of(PART_STEP, PART_STEP, tp=2), ("fc", "t"))


def test_rules_come_from_a_file(tmp_path, capsys):
    paths = [
        str(written(run, tmp_path / name))
        for name, run in (("one", ONE), ("two", ranks_of(PART_STEP, PART_STEP, tp=2)))
    ]
    file = tmp_path / "place.yaml"
    file.write_text('place:\n- {boundaries: "rou*", placement: "t h", roles: [input, output]}\n')

    assert main(["compare", *paths, "--place", str(file)]) == 0
    assert "2 compared" in capsys.readouterr().out
    for text, sentence in (
        ("place:\n- {boundaries: x}\n", "rule 1 has no placement"),
        ("place:\n- {boundaries: x, placement: 't ['}\n", "rule 1: cannot read placement 't ['"),
        ("rename: []\n", "it is not a list of rules under the name 'place'"),
    ):
        file.write_text(text)
        assert main(["compare", *paths, "--place", str(file)]) == 2
        assert sentence in capsys.readouterr().err


def test_a_rule_that_names_nothing_is_told(tmp_path, capsys):
    paths = [
        str(written(run, tmp_path / name))
        for name, run in (("one", ONE), ("two", ranks_of(PART_STEP, PART_STEP, tp=2)))
    ]
    file = tmp_path / "place.yaml"
    file.write_text("place:\n- {boundaries: ruoter, placement: 't h'}\n")

    main(["compare", *paths, "--place", str(file), "--verbose"])

    assert "--place: ruoter names nothing without a placement" in capsys.readouterr().out
