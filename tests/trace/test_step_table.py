"""Steps as columns, and the rank that is read again where too many are open."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trace.sample_events import make_batch, make_keys
from upguard_plugin.trace import reader
from upguard_plugin.trace.batch import StepEntry
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.step_table import StepTable
from upguard_plugin.trace.writer import RankWriter

ENTRIES = [
    StepEntry(3, None, None, 0, bytes(range(16))),
    StepEntry(4, 104, "skipped", 7, b"\xff" * 16),
    StepEntry(9, -5, "rerun", 1 << 39, b"0123456789abcdef"),
]


def test_a_table_is_the_sequence_of_its_entries():
    table = StepTable.of(ENTRIES)

    assert (list(table), len(table), table[-1]) == (ENTRIES, 3, ENTRIES[-1])
    assert list(table[1:]) == ENTRIES[1:]
    assert StepTable.of(table) is table
    assert [table.row_of(step) for step in (3, 4, 5, 9, 10)] == [0, 1, None, 2, None]


def test_an_empty_table_has_no_entries():
    table = StepTable.of([])

    assert (list(table), table.row_of(0), table.digest.shape) == ([], None, (0, 2))


@pytest.fixture
def run(tmp_path):
    """Two ranks that are still recording."""
    run = claim_run_directory(tmp_path / "run", rank=0, run_token="t")
    write_manifest(run, Manifest(run_id_of(run), world_size=2))
    return run


def test_a_rank_that_is_opened_again_has_the_steps_it_had(run, monkeypatch):
    monkeypatch.setattr(reader, "_KEPT_RECORDS", 1)
    writers = [RankWriter(run, rank) for rank in (0, 1)]
    for writer in writers:
        for step in range(2):
            writer.write(make_batch(step, make_keys()))
    trace = open_trace(run)
    before = [list(trace.steps(rank)) for rank in (0, 1)]
    writers[0].write(make_batch(2, make_keys()))

    assert [list(trace.steps(rank)) for rank in (0, 1)] == before
    assert np.array_equal(trace.read(0, 1).h, make_batch(1, make_keys()).h)
    assert len(open_trace(run).steps(0)) == 3
