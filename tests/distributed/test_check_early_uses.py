"""Outputs that are used before the wait for their work are found; what may use them is not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import early_uses
import pytest
from ranks import Ranks
from test_check import check

# (what happens, level) -> boundary, operator
FAULTS = {
    (early_uses.read, "op"): ("all_reduce[world]", "aten.mul"),
    (early_uses.written, "op"): ("all_reduce[world]", "aten.div_"),
    (early_uses.half_of_a_buffer, "op"): ("broadcast[world]", "aten.sum"),
    (early_uses.received, "op"): ("recv[world]", "aten.neg"),
    (early_uses.forgotten, "op"): ("all_reduce[world]", "aten.sum"),
    (early_uses.chained, "stage"): ("all_reduce[world]", "c10d._allgather_base_"),
    (early_uses.bucket, "op"): ("all_reduce[dp] bucket 1 (1.weight)", "aten.mul_"),
}


def early(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in report if one["invariant"] == "outputs-awaited"]


def line_of(case: early_uses.Case) -> int:
    lines, first = inspect.getsourcelines(case)
    return first + next(i for i, line in enumerate(lines) if line.endswith("# too early\n"))


@pytest.mark.parametrize(
    ("case", "level"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_use_before_the_wait_is_named_with_its_operator_and_line(
    two_ranks: Ranks, tmp_path: Path, case: early_uses.Case, level: str
) -> None:
    two_ranks.run(case, str(tmp_path / "wrong"), level, True)
    two_ranks.run(case, str(tmp_path / "right"), level, False)

    found = early(check(tmp_path / "wrong")["broken"])
    clean = check(tmp_path / "right")

    boundary, operator = FAULTS[case, level]
    assert [(one["boundary"], one["operator"]) for one in found] == [(boundary, operator)]
    if operator is not None:  # else the line is that of the collective
        assert found[0]["source"]["file"].endswith("early_uses.py")
        assert found[0]["source"]["line"] == line_of(case)
    assert early(clean["broken"]) == early(clean["suspects"]) == []


def test_a_use_that_had_luck_is_a_suspect(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(early_uses.lucky, str(tmp_path / "wrong"), "op", True)
    two_ranks.run(early_uses.lucky, str(tmp_path / "right"), "op", False)

    wrong, right = check(tmp_path / "wrong"), check(tmp_path / "right")

    assert wrong["broken"] == []
    assert [one["explanation"] for one in early(wrong["suspects"])] == [
        "aten.sum reads output 0 of all_reduce[world] before the program has waited for the "
        "collective, which happened to be over."
    ]
    assert early(wrong["suspects"])[0]["source"]["line"] == line_of(early_uses.lucky)
    assert early(right["suspects"]) == []
    assert right["checked"]["outputs-awaited"] == 2


def test_a_write_that_only_a_version_counter_tells_is_a_suspect(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(early_uses.written, str(tmp_path / "wrong"), "stage", True)
    two_ranks.run(early_uses.written, str(tmp_path / "right"), "stage", False)

    wrong, right = check(tmp_path / "wrong"), check(tmp_path / "right")

    assert wrong["broken"] == []
    assert [(one["boundary"], one["operator"]) for one in early(wrong["suspects"])] == [
        ("all_reduce[world]", None)
    ]
    assert early(right["suspects"]) == []


def test_changes_of_shape_in_place_use_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(early_uses.reshaped, str(tmp_path / "run"), "op")
    silent(tmp_path / "run")


def silent(run: Path, level: str = "op") -> None:
    report = check(run)
    assert report["broken"] == []
    assert early(report["suspects"]) == []
    assert ("outputs-awaited" in report["checked"]) == (level == "op")


@pytest.mark.parametrize("hook", ["", "views", "fp16", "allreduce", "power"])
def test_a_reducer_may_use_its_buckets(two_ranks: Ranks, tmp_path: Path, hook: str) -> None:
    two_ranks.run(early_uses.hooked, str(tmp_path / "run"), hook)
    silent(tmp_path / "run")


def test_gathering_ahead_is_no_early_use(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(early_uses.prefetched, str(tmp_path / "run"))
    silent(tmp_path / "run")


@pytest.mark.parametrize("level", ["stage", "op"])
def test_results_that_wait_by_themselves_and_what_backends_write_may_be_used(
    two_ranks: Ranks, tmp_path: Path, level: str
) -> None:
    two_ranks.run(early_uses.functions, str(tmp_path / "run"), level)
    silent(tmp_path / "run", level)
