"""A process that writes a trace is really killed, and what it has written is read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.trace.sample_events import make_batch, make_keys, same
from upguard_plugin.errors import RunDirectoryError
from upguard_plugin.trace import writer
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.writer import RankWriter


def batch_of(step: int):
    """Steps with new keys and other columns now and then, so that every file grows."""
    keys = make_keys(8 + 4 * (step // 5))
    optional = {"producer": np.arange(200) - 1} if step % 3 == 0 else {}
    return make_batch(step, keys, num_events=200, **optional)


def write_until_killed(run: Path, report: int) -> None:
    """Write steps for ever; after each, its number goes through the pipe `report`."""
    recorder = RankWriter(run, 0)
    for step in range(1_000_000):
        recorder.write(batch_of(step))
        recorder.note(f"step {step} is written")
        os.write(report, b"%d\n" % step)


@pytest.mark.parametrize("seed", range(25))
def test_a_killed_process_loses_at_most_the_step_it_was_writing(run, monkeypatch, seed):
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 20_000)
    chance = random.Random(seed)
    reader, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_until_killed(run, report)
        finally:
            os._exit(1)
    os.close(report)
    reported = 0
    with os.fdopen(reader, "rb") as reports:
        for _ in range(chance.randrange(1, 30)):
            reported += len(reports.readline()) > 0
        for _ in range(chance.randrange(20_000)):
            pass  # to somewhere inside the next step
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        reported += len(reports.readlines())
    assert os.WTERMSIG(status) == signal.SIGKILL

    trace = open_trace(run)
    end = trace.end(0)
    assert (end.complete, end.reason) == (False, "still running or killed")
    steps = [entry.step for entry in trace.steps(0)]
    assert steps == list(range(len(steps)))
    assert reported <= len(steps) <= reported + 1
    assert len(end.notes) in (len(steps), len(steps) - 1)
    assert all(same(trace.read(0, step, verify=True), batch_of(step)) for step in steps)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)  # fails if a file was left open


def test_a_full_disk_stops_the_recording_and_the_trace_says_where(small_disk):
    run = claim_run_directory(small_disk / "run", rank=0, run_token=None)
    write_manifest(run, Manifest(run_id_of(run)))
    recorder = RankWriter(run, 0)
    for step in range(200):
        recorder.write(batch_of(step))
    recorder.note("too late")
    recorder.close()

    trace = open_trace(run)
    num_steps = len(trace.steps(0))
    assert 5 < num_steps < 200
    assert trace.end(0).reason == f"disk full: recording stopped before step {num_steps}"
    assert all(same(trace.read(0, step, verify=True), batch_of(step)) for step in range(num_steps))


def test_a_disk_that_is_full_from_the_start_is_a_sentence(small_disk):
    (small_disk / "filler").write_bytes(bytes(252 << 10))
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        RankWriter(small_disk, 0)
