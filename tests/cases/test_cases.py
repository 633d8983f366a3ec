"""The exam: every case is answered exactly, and its clean twin is silent."""

from __future__ import annotations

import pytest

from tests.cases.case import Case, all_equal, check_of, first_is, grade, grade_check, verdict_of
from tests.cases.recordings import all_cases, all_siblings

CASES = [*all_cases(), *all_siblings()]


def name_of(case: Case) -> str:
    return case.module.rpartition(".")[2]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_fault_is_named_exactly(case, recordings):
    baseline, target = recordings.of(case, "baseline"), recordings.of(case, "target")

    verdict = verdict_of(baseline, target, *case.options)

    assert all(grade(case, verdict).values()), verdict["first_divergence"]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_clean_twin_is_silent(case, recordings):
    baseline, twin = recordings.of(case, case.twin_of), recordings.of(case, "twin")

    assert verdict_of(baseline, twin, *case.options)["verdict"] == "identical"


@pytest.mark.parametrize("case", [case for case in CASES if case.whole], ids=name_of)
def test_the_fault_is_named_against_one_rank_too_and_the_twin_is_silent(case, recordings):
    whole = recordings.of(case, "whole")
    target, twin = recordings.of(case, "target"), recordings.of(case, "twin")

    verdict = verdict_of(whole, target, "--exact")

    assert first_is(verdict, case.whole), verdict["first_divergence"]
    assert verdict_of(whole, twin, "--exact")["verdict"] == "identical"


@pytest.mark.parametrize("case", [case for case in CASES if case.equal], ids=name_of)
def test_what_the_fault_leaves_alone_is_equal(case, recordings):
    assert all_equal(case, recordings.of(case, "baseline"), recordings.of(case, "target"))


CHECKED = [case for case in CASES if case.broken or case.breaks_nothing]


@pytest.mark.parametrize("case", CHECKED, ids=name_of)
def test_the_target_alone_breaks_what_the_answer_says_and_the_twin_nothing(case, recordings):
    target, twin = (check_of(recordings.of(case, case.checked(v))) for v in ("target", "twin"))

    assert all(grade_check(case, target).values()), target["broken"]
    assert twin["broken"] == []
