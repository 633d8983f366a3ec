"""The scoreboard says what is right and what is not; sections that are not asked for stay."""

from __future__ import annotations

from tests.cases import peers
from tests.cases.case_61 import CASE
from tests.cases.scoreboard import SEARCH, kept, page, row, search_section


def test_a_field_that_is_wrong_shows_and_the_case_is_not_solved():
    assert row(CASE, {"step": True, "kind": False, "twin": True}) == (
        "| 61 | NVIDIA/Megatron-LM#6237 | right |  |  |  |  | **wrong** |  |  |  | right | **no** |"
    )


def test_solved_cases_and_silent_twins_are_counted():
    results = {
        1: (CASE, {"twin": True}),
        2: (CASE, {"kind": False, "twin": True}),
        3: (CASE, {"twin": False}),
    }

    assert "\n1 of 3 cases solved, 2 clean twins silent.\n" in page(results)


def test_every_miss_of_a_search_is_listed_and_a_false_alarm_is_called_one():
    trials = [
        {"layout": "dp", "family": "rng", "exact": True, "story": ""},
        {"layout": "tp", "family": "rng", "exact": False, "story": "trial 7"},
        {"layout": "tp", "family": "timing", "exact": False, "story": "trial 8"},
    ]

    text = search_section(trials)

    assert "Of 3 trials 1 are named exactly, 1 are false alarms;" in text
    assert "| rng | 1 of 1 | 0 of 1 |\n| timing |  | 0 of 1 |" in text
    assert "- trial 7\n- trial 8" in text


def test_a_section_is_kept_as_it_is():
    document = f"# Cases\n\ntable\n\n## {SEARCH}\n\n300 trials\n\n## Other\n\nmore\n"

    assert kept(document, SEARCH) == f"## {SEARCH}\n\n300 trials\n"
    assert kept(document, "What is not there") == ""


def test_a_peer_is_quoted_with_its_first_mismatch_and_its_refusals():
    answers = {
        3: peers.PeerAnswer("`aten::mm`, and 4 more", "no mismatch"),
        5: peers.PeerAnswer("refused: log lengths don't match", "`c10d::allreduce_`"),
    }

    text = peers.section(answers)

    assert "Its twins are silent in 1 of 2." in text
    assert "| 3 | `aten::mm`, and 4 more | no mismatch |" in text
    assert (
        peers.first_of([peers.PeerAnswer("no mismatch", "no mismatch"), answers[5]]) == answers[5]
    )
