"""The exam: every case is answered exactly, and its clean twin is silent."""

from __future__ import annotations

import pytest

from tests.cases.case import grade, verdict_of
from tests.cases.recordings import all_cases

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.number}")
def test_the_fault_is_named_exactly(case, recordings):
    baseline, target = recordings.of(case, "baseline"), recordings.of(case, "target")

    verdict = verdict_of(baseline, target)

    assert all(grade(case, verdict).values()), verdict["first_divergence"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.number}")
def test_the_clean_twin_is_silent(case, recordings):
    baseline, twin = recordings.of(case, "baseline"), recordings.of(case, "twin")

    assert verdict_of(baseline, twin)["verdict"] == "identical"
