"""`upguard check` on real runs of two gloo ranks: every fault is found, its clean twin is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checked
import pytest
from click.testing import CliRunner
from ranks import Ranks

from upguard_plugin.cli import upguard


def check(run: Path) -> dict[str, Any]:
    result = CliRunner().invoke(upguard, ["check", str(run), "--format", "json"])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.output)
    assert result.exit_code == (1 if report["broken"] else 0)
    return report


@pytest.mark.parametrize("level", ["stage", "module", "op"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp named"])
def test_nothing_is_broken_in_a_clean_run(
    two_ranks: Ranks, tmp_path: Path, kind: str, level: str
) -> None:
    two_ranks.run(checked.train, kind, str(tmp_path / "run"), level)
    report = check(tmp_path / "run")
    print(report["checked"], report["not_applied"], report["never_applied"])
    assert report["broken"] == []
    assert report["suspects"] == []
    assert report["checked"]["collectives-match"] > 0
