from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest

from upguard_plugin import records, verdict

SCHEMA = Path(__file__).resolve().parent.parent / "docs" / "verdict.schema.json"


def test_the_published_schema_is_up_to_date():
    remedy = "run: python -m upguard_plugin.verdict > docs/verdict.schema.json"
    assert SCHEMA.read_text() == verdict.json_schema() + "\n", remedy


def test_kinds_are_those_of_the_records():
    assert verdict.Kind.__args__ == records.KINDS


def test_a_verdict_survives_its_json():
    made = verdict.Verdict(
        verdict="incomparable",
        baseline=verdict.RunSide(path="a", run_id="1", layout={"world_size": 1}),
        target=verdict.RunSide(path="b", run_id="2", layout={"world_size": 2}),
        first_divergence=None,
        concurrent=[],
        tainted=None,
        per_rank=[],
        certified=verdict.Certified(events=0, last=None),
        coverage=verdict.Coverage(
            ranks=0,
            compared=0,
            differ=0,
            unmatched_baseline=0,
            unmatched_target=0,
            not_comparable=0,
            filtered=0,
            noise=0,
            never_fired=0,
        ),
        notes=["the layouts differ"],
    )
    fields = json.loads(made.to_json())

    assert (fields["schema"], made.exit_code) == ("upguard.verdict/1", 3)
    assert verdict.Verdict.model_validate(fields) == made
    with pytest.raises(pydantic.ValidationError):
        verdict.Verdict.model_validate(fields | {"verdict": "equal"})
