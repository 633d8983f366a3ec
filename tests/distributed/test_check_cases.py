"""`upguard check` finds public bugs in the faulty run alone, where its layout is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import told_cases
from ranks import Ranks

from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

REPLICATED = {"grad_input": "b s h"}  # over tp, which is not named
CASES = {
    "case_7": (
        {"layout": {"tp": 2}, "placements": {"blocks.*.mlp.enter": REPLICATED}},
        ("replicas-agree", 0, "backward", "blocks.1.mlp.enter", "grad_input", [0, 1]),
    ),
    "case_23": (
        {"layout": {"ep": 2}},
        ("streams-differ", 2, "start", "rng.moe.gate.expert", "rng", [0, 1]),
    ),
}


def check(run: Path) -> Any:
    return check_run(open_trace(run), Selection())


def first(report: Any) -> tuple[Any, ...]:
    found = report.broken[0]
    return found.invariant, found.step, found.phase, found.boundary, found.role, found.ranks


@pytest.mark.parametrize("name", CASES)
def test_a_public_bug_is_named_exactly_and_its_twin_is_silent(
    two_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    options, answer = CASES[name]
    for variant in ("target", "twin"):
        folder = str(tmp_path / variant)
        two_ranks.run(told_cases.told, f"tests.cases.{name}", variant, folder, options)

    twin = check(tmp_path / "twin")

    assert first(check(tmp_path / "target")) == answer
    assert twin.broken == [] and twin.checked[answer[0]] > 0


def test_tied_weights_that_part_in_their_update_are_found_and_their_twin_is_silent(
    tmp_path: Path,
) -> None:
    four_ranks = Ranks(4)
    try:
        for name, fault in (("target", True), ("twin", False)):
            four_ranks.run(told_cases.tied_embedding, str(tmp_path / name), fault)
    finally:
        four_ranks.close()

    broken, twin = check(tmp_path / "target").broken, check(tmp_path / "twin")

    assert broken[0].invariant == "tied-agree"
    assert (broken[0].step, broken[0].boundary, broken[0].role) == (0, "embed.weight", "param")
    assert broken[0].ranks in ([0, 2], [1, 3])
    assert twin.broken == [] and twin.checked["tied-agree"] > 0
