from __future__ import annotations

from pathlib import Path

import pytest

from tests.trace.sample_events import LAYOUT, make_batch, make_keys
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.writer import RankWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one rank with a manifest and nothing recorded."""
    directory = claim_run_directory(tmp_path / "run", rank=0, run_token=None)
    write_manifest(directory, Manifest(run_id_of(directory), ("python", "train.py")))
    return directory


@pytest.fixture
def recorded(run: Path) -> Path:
    """A complete run of one rank and five steps."""
    keys = make_keys()
    writer = RankWriter(run, 0, layout=LAYOUT, device="cpu: test")
    for step in range(5):
        writer.write(make_batch(step, keys, iteration=100 + step))
    writer.note("module head was compiled: what is inside it was not seen")
    writer.close()
    return run
