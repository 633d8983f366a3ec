from __future__ import annotations

import errno
import os
import resource
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tests.trace.sample_events import LAYOUT, all_optional, make_batch, make_keys, same
from upguard_plugin.errors import RunDirectoryError
from upguard_plugin.trace import segments, writer
from upguard_plugin.trace.digest import step_digest
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.trace.writer import RankWriter


def test_what_was_written_is_read_back(recorded):
    trace = open_trace(recorded)

    assert trace.ranks == (0,)
    assert trace.missing_ranks == ()
    assert trace.layout(0) == LAYOUT
    assert trace.device(0) == "cpu: test"
    assert [entry.step for entry in trace.steps(0)] == [0, 1, 2, 3, 4]
    assert [entry.iteration for entry in trace.steps(0)] == [100, 101, 102, 103, 104]
    assert trace.end(0).complete
    assert trace.end(0).notes == ("module head was compiled: what is inside it was not seen",)
    for step in (3, 0, 4, 1, 2):
        expected = make_batch(step, make_keys(), iteration=100 + step)
        assert same(trace.read(0, step, verify=True), expected)


def test_every_optional_column_is_read_back(run):
    keys = make_keys()
    batch = make_batch(0, keys, num_events=30, mark="rerun", **all_optional(30))
    recorder = RankWriter(run, 0)
    recorder.write(batch)
    recorder.close()

    assert same(open_trace(run).read(0, 0, verify=True), batch)


@pytest.mark.parametrize("name", sorted(segments.OPTIONAL))
def test_an_optional_column_that_comes_and_goes_is_absent_where_it_was(run, name):
    keys = make_keys()
    column = {name: all_optional(len(keys))[name]}
    batches = [make_batch(step, keys, **(column if step % 2 else {})) for step in range(6)]
    recorder = RankWriter(run, 0)
    for batch in batches:
        recorder.write(batch)
    recorder.close()

    trace = open_trace(run)
    assert all(same(trace.read(0, batch.step), batch) for batch in batches)
    assert len(list(run.glob("rank00000/segment-*.arrow"))) == 2


def test_an_empty_step_is_a_step(run):
    batch = make_batch(0, make_keys(), num_events=0)
    recorder = RankWriter(run, 0)
    recorder.write(batch)
    recorder.close()

    trace = open_trace(run)
    assert trace.steps(0)[0].num_events == 0
    assert same(trace.read(0, 0, verify=True), batch)


def test_keys_that_come_later_join_the_table(run):
    keys = make_keys(4)
    recorder = RankWriter(run, 0)
    batches = []
    for step in range(4):
        batches.append(make_batch(step, list(keys)))
        recorder.write(make_batch(step, keys))
        keys += make_keys(40)[len(keys) : len(keys) + 9]
    recorder.close()

    trace = open_trace(run)
    assert all(same(trace.read(0, batch.step, verify=True), batch) for batch in batches)


def test_another_key_table_every_step_gives_the_same_trace(run, tmp_path):
    recorder = RankWriter(run, 0)
    other = RankWriter(tmp_path / "other", 0)
    keys = make_keys()
    for step in range(3):
        batch = make_batch(step, keys)
        recorder.write(batch)
        shuffled = replace(batch, keys=keys[::-1], key=(len(keys) - 1 - batch.key).astype(np.int32))
        other.write(shuffled)
    recorder.close()
    other.close()

    for name in ("keys.arrow", "index.bin", "segment-00000.arrow"):
        written = (run / "rank00000" / name).read_bytes()
        assert written == (tmp_path / "other" / "rank00000" / name).read_bytes()


def test_segments_roll_over_at_a_size(run, monkeypatch):
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 2000)
    keys = make_keys()
    batches = [make_batch(step, keys) for step in range(20)]
    recorder = RankWriter(run, 0)
    for batch in batches:
        recorder.write(batch)
    recorder.close()

    trace = open_trace(run)
    assert len(list(run.glob("rank00000/segment-*.arrow"))) > 3
    assert all(same(trace.read(0, batch.step), batch) for batch in batches)


def test_a_segment_is_an_arrow_stream_for_everybody(recorded):
    with pa.ipc.open_stream(recorded / "rank00000" / "segment-00000.arrow") as stream:
        table = stream.read_all()
    with pa.ipc.open_stream(recorded / "rank00000" / "keys.arrow") as stream:
        keys = stream.read_all()

    assert table.num_rows == 5 * len(make_keys())
    boundaries = keys.column("boundary").take(table.column("key")).to_pylist()
    assert boundaries[: len(make_keys())] == [key.boundary for key in make_keys()]


@pytest.mark.parametrize("num_keys", [100, 700])
def test_an_event_takes_at_most_48_bytes(run, num_keys):
    num_events, num_steps = 2800, 5
    keys = make_keys(num_keys)
    producer = np.arange(num_events) - 3
    recorder = RankWriter(run, 0)
    for step in range(num_steps):
        recorder.write(make_batch(step, keys, num_events=num_events, producer=producer))
    recorder.close()

    on_disk = sum(file.stat().st_size for file in (run / "rank00000").iterdir())
    assert on_disk / (num_events * num_steps) <= 48
    assert recorder.bytes_written == on_disk


def test_max_bytes_stops_before_the_step_that_would_exceed_it(run):
    keys = make_keys()
    recorder = RankWriter(run, 0, max_bytes=20_000)
    for step in range(100):
        recorder.write(make_batch(step, keys, num_events=300))
    recorder.close()

    on_disk = sum(file.stat().st_size for file in (run / "rank00000").iterdir())
    trace = open_trace(run)
    num_steps = len(trace.steps(0))
    assert on_disk <= 20_000
    assert 1 <= num_steps < 10
    assert recorder.stopped == (
        f"max_bytes (20000) reached: recording stopped before step {num_steps}"
    )
    assert not trace.end(0).complete
    assert trace.end(0).reason == recorder.stopped
    assert all(trace.read(0, step, verify=True) for step in range(num_steps))


def test_a_large_max_bytes_stops_nothing(run):
    recorder = RankWriter(run, 0, max_bytes=10_000_000)
    recorder.write(make_batch(0, make_keys()))
    recorder.close()

    assert recorder.stopped is None
    assert open_trace(run).end(0).complete


def test_a_file_size_limit_stops_the_recording_and_not_the_process(run):
    keys = make_keys()
    recorder = RankWriter(run, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # Python ignores SIGXFSZ
    try:
        for step in range(40):
            recorder.write(make_batch(step, keys, num_events=300))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    trace = open_trace(run)
    num_steps = len(trace.steps(0))
    assert 1 <= num_steps < 40
    assert trace.end(0).reason == f"disk full: recording stopped before step {num_steps}"
    assert all(trace.read(0, step, verify=True) for step in range(num_steps))


@pytest.mark.parametrize("file", ["_keys", "_index", "_notes", "segment"])
@pytest.mark.parametrize("written", [0, 1, 50])
def test_a_disk_that_fills_up_in_any_file_leaves_whole_steps(run, monkeypatch, file, written):
    keys = make_keys(4)
    recorder = RankWriter(run, 0)
    recorder.write(make_batch(0, keys))
    keys += make_keys(20)[4:]
    full = (
        next(iter(recorder._segments.values())).file
        if file == "segment"
        else recorder.__dict__[file]
    )
    write = os.write

    def write_on_full_disk(descriptor, data):
        if descriptor != full._descriptor:
            return write(descriptor, data)
        if written and len(data) > written:
            return write(descriptor, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_on_full_disk)
    recorder.write(make_batch(1, keys))
    recorder.note("a note")
    recorder.write(make_batch(2, keys))
    recorder.close()

    trace = open_trace(run)
    assert recorder.stopped is not None
    assert trace.end(0).reason == recorder.stopped
    assert recorder.stopped.startswith("disk full: ")
    num_steps = len(trace.steps(0))
    assert num_steps == (2 if file == "_notes" else 1)
    assert all(trace.read(0, step, verify=True) for step in range(num_steps))


def test_an_error_inside_stops_the_trace_and_says_so(run):
    recorder = RankWriter(run, 0)
    recorder.write(make_batch(0, make_keys()))
    broken = replace(make_batch(1, make_keys()), h=np.array(["no number"]))
    with pytest.raises(ValueError, match="no number"):
        recorder.write(broken)
    recorder.write(make_batch(2, make_keys()))
    recorder.close()

    trace = open_trace(run)
    assert [entry.step for entry in trace.steps(0)] == [0]
    assert trace.end(0).reason == "an error inside UpGuard: recording stopped before step 1"


def test_a_reason_makes_the_trace_incomplete(run):
    recorder = RankWriter(run, 0)
    recorder.write(make_batch(0, make_keys()))
    recorder.close("the training raised ValueError")
    recorder.close()
    recorder.write(make_batch(1, make_keys()))

    end = open_trace(run).end(0)
    assert (end.complete, end.reason) == (False, "the training raised ValueError")


def test_a_long_reason_and_odd_notes_are_kept(run):
    recorder = RankWriter(run, 0)
    notes = ("zwei\nZeilen", "\x00\u2028 \N{SNOWMAN}", "")
    for note in notes:
        recorder.note(note)
    recorder.close("\N{SNOWMAN}" * 10_000)

    end = open_trace(run).end(0)
    assert end.reason == "\N{SNOWMAN}" * 500
    assert end.notes == notes


def test_two_writers_do_not_share_a_rank(run):
    RankWriter(run, 0)
    with pytest.raises(
        RunDirectoryError, match=r"cannot record in .*rank00000: it holds a trace already"
    ):
        RankWriter(run, 0)


def test_dumps_are_read_back(run):
    recorder = RankWriter(run, 0)
    tensors = {"out.0": np.arange(6.0).reshape(2, 3), "out.1": np.array(7, np.int16)}
    recorder.write_tensors("../blocks/1.mlp step 3", tensors)
    recorder.write_tensors("a" * 1000, tensors)
    recorder.close()

    assert open_trace(run).read_tensors(0, "a" * 1000)["out.1"] == 7
    found = open_trace(run).read_tensors(0, "../blocks/1.mlp step 3")
    assert {name: array.tolist() for name, array in found.items()} == {
        "out.0": [[0, 1, 2], [3, 4, 5]],
        "out.1": 7,
    }
    files = [file.parent.name for file in run.rglob("*.safetensors")]
    assert files == ["tensors", "tensors"]


def test_the_digest_in_the_index_is_that_of_the_batch(run):
    keys = make_keys()
    batch = make_batch(0, keys, num_events=100)
    recorder = RankWriter(run, 0)
    recorder.write(batch)

    trace = open_trace(run)
    assert trace.steps(0)[0].digest == step_digest(batch) == step_digest(trace.read(0, 0))


def test_reading_a_step_in_the_middle_reads_little_else(run, monkeypatch):
    keys = make_keys()
    recorder = RankWriter(run, 0)
    for step in range(1000):
        recorder.write(make_batch(step, keys))
    recorder.close()
    whole = (run / "rank00000" / "segment-00000.arrow").stat().st_size
    trace = open_trace(run)
    trace.steps(0)
    amounts = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: amounts.append(args[1]) or pread(*args))

    started = time.perf_counter()
    trace.read(0, 500)

    assert sum(amounts) < whole / 20
    assert time.perf_counter() - started < 1
