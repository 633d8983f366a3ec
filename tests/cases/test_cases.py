"""The exam: every case is answered exactly, and its clean twin is silent."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.cases.case import Case, record, verdict_of


def all_cases() -> list[Case]:
    files = sorted(Path(__file__).parent.glob("case_*.py"))
    return [import_module(f"tests.cases.{file.stem}").CASE for file in files]


CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.number}")
def test_the_fault_is_named_exactly(case, tmp_path):
    baseline = record(case, "baseline", tmp_path / "baseline")
    target = record(case, "target", tmp_path / "target")

    verdict = verdict_of("compare", str(baseline), str(target))

    first = verdict["first_divergence"]
    if case.answer is None:
        assert first is None, first
    else:
        assert first is not None, "called identical"
        assert {name: first[name] for name in case.answer} == dict(case.answer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.number}")
def test_the_clean_twin_is_silent(case, tmp_path):
    baseline = record(case, "baseline", tmp_path / "baseline")
    twin = record(case, "twin", tmp_path / "twin")

    assert verdict_of("compare", str(baseline), str(twin))["verdict"] == "identical"
