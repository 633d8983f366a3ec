from __future__ import annotations

from pathlib import Path

from upguard_plugin import check_report

SCHEMA = Path(__file__).resolve().parent.parent / "docs" / "check.schema.json"


def test_the_published_schema_is_up_to_date():
    remedy = "run: python -m upguard_plugin.check_report > docs/check.schema.json"
    assert SCHEMA.read_text() == check_report.json_schema() + "\n", remedy
