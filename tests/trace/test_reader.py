from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.trace.sample_events import make_batch, make_keys
from upguard_plugin.errors import TraceError
from upguard_plugin.trace.files import to_json
from upguard_plugin.trace.index import HEADER, RECORD
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.trace.run_directory import run_id_of
from upguard_plugin.trace.writer import RankWriter

COPY = "\n  try  copy the run again from where it was recorded, or record it again"


def message(action, *args, **kwargs) -> str:
    with pytest.raises(TraceError) as caught:
        action(*args, **kwargs)
    assert caught.value.exit_code == 2
    return str(caught.value)


def read_all(run: Path) -> list:
    trace = open_trace(run)
    return [
        [trace.layout(rank), trace.end(rank)]
        + [trace.read(rank, entry.step, verify=True) for entry in trace.steps(rank)]
        for rank in trace.ranks
    ]


def test_no_such_run(tmp_path):
    assert message(open_trace, tmp_path / "nowhere") == (
        f"cannot read {tmp_path}/nowhere: no such run\n  try  check the path"
    )


def test_an_empty_directory(tmp_path):
    assert message(open_trace, tmp_path) == (
        f"cannot read {tmp_path}: the directory is empty\n"
        "  try  check the path, and whether recording was switched on"
    )


def test_a_file(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    assert message(open_trace, tmp_path / "run.json") == (
        f"cannot read {tmp_path}/run.json: a run is a directory\n"
        "  try  name the directory of the run"
    )


def test_a_directory_of_another_tool(tmp_path):
    (tmp_path / "dump.json").write_text("{}")
    assert message(open_trace, tmp_path) == (
        f"cannot read {tmp_path}: it is not a run of UpGuard\n"
        "  missing  manifest.json, rank00000/\n"
        "  try      name a directory that UpGuard has written"
    )


def test_a_lost_manifest(recorded):
    (recorded / "manifest.json").unlink()
    assert message(open_trace, recorded) == (
        f"cannot read {recorded}/manifest.json: the file is missing" + COPY
    )


def test_missing_ranks_are_listed(recorded):
    write_manifest(recorded, Manifest(run_id_of(recorded), world_size=3))
    (recorded / "rank00001").mkdir()  # killed before it recorded anything
    trace = open_trace(recorded)

    assert (trace.ranks, trace.missing_ranks) == ((0,), (1, 2))
    assert message(trace.read, 2, 0) == (
        f"cannot read rank 2 of {recorded}: it has no trace\n"
        "  found  ranks 0\n"
        "  try    copy rank00002 from where it was recorded, or leave the rank out"
    )


def test_ranks_that_were_not_to_be_recorded_are_not_missing(recorded):
    write_manifest(recorded, Manifest(run_id_of(recorded), world_size=3, recorded_ranks=(0, 2)))
    assert open_trace(recorded).missing_ranks == (2,)


def test_a_step_that_was_not_recorded(recorded):
    assert message(open_trace(recorded).read, 0, 9) == (
        f"cannot read step 9 of {recorded}/rank00000: it was not recorded\n"
        "  recorded  5 steps, 0 to 4\n"
        "  try       name a recorded step"
    )


def test_a_run_still_being_written_is_read_as_far_as_it_goes(run):
    writer = RankWriter(run, 0)
    assert list(open_trace(run).steps(0)) == []
    writer.write(make_batch(0, make_keys()))
    trace = open_trace(run)

    assert [entry.step for entry in trace.steps(0)] == [0]
    writer.write(make_batch(1, make_keys()))
    assert [entry.step for entry in trace.steps(0)] == [0]  # a snapshot
    assert (trace.end(0).complete, trace.end(0).reason) == (False, "still running or killed")
    assert len(read_all(run)[0]) == 4


@pytest.mark.parametrize("file", ["manifest.json", "rank00000/rank.json", "rank00000/index.bin"])
def test_a_newer_schema(recorded, file):
    path = recorded / file
    if path.suffix == ".bin":
        data = bytearray(path.read_bytes())
        data[8] = 2
        path.write_bytes(data)
    else:
        fields = json.loads(path.read_text())
        del fields["checksum"]
        path.write_bytes(to_json(fields | {"schema_version": 2}))
    assert message(read_all, recorded) == (
        f"cannot read {path}: its schema is newer than this UpGuard\n"
        "  file     schema 2\n"
        "  UpGuard  schema 1\n"
        "  try      read it with the UpGuard that recorded it, or a later one"
    )


FILES = [
    "manifest.json",
    "rank00000/rank.json",
    "rank00000/end.json",
    "rank00000/notes.txt",
    "rank00000/index.bin",
    "rank00000/keys.arrow",
    "rank00000/segment-00000.arrow",
]


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_is_noticed(recorded, file):
    path = recorded / file
    whole = path.read_bytes()
    read_all(recorded)
    end_of_stream = 8 if file.endswith("0.arrow") else 0  # which is there for other tools
    for place in range(0, len(whole) - end_of_stream, max(len(whole) // 97, 1)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        if damaged.split() == whole.split():
            continue  # white space behind the checksum of a JSON file
        path.write_bytes(damaged)
        try:
            read_all(recorded)
        except TraceError as error:
            assert str(path) in str(error)
            assert error.remedy
        else:
            raise AssertionError(f"bit {place % 8} of byte {place} of {file} was not noticed")


@pytest.mark.parametrize("file", FILES)
def test_a_shortened_file_of_a_complete_run_is_noticed(recorded, file):
    path = recorded / file
    whole = path.read_bytes()
    unseen = 8 if file.endswith("0.arrow") else 0
    # The padding of JSON files may be cut off.
    num_bytes = len(whole.rstrip()) if file.endswith(".json") else len(whole)
    for length in range(0, num_bytes - unseen, max(len(whole) // 97, 1)):
        path.write_bytes(whole[:length])
        assert str(path) in message(read_all, recorded)


def test_a_lost_last_step_of_a_complete_run_is_noticed(recorded):
    path = recorded / "rank00000" / "index.bin"
    path.write_bytes(path.read_bytes()[: -RECORD.itemsize])
    assert message(read_all, recorded) == (
        f"cannot read {path}: it holds 4 steps, 5 were written" + COPY
    )


def test_a_lost_step_in_the_middle_is_noticed(recorded):
    path = recorded / "rank00000" / "index.bin"
    data = path.read_bytes()
    start = HEADER.itemsize + RECORD.itemsize
    path.write_bytes(data[:start] + data[start + RECORD.itemsize :])
    assert message(read_all, recorded) == (
        f"cannot read {path}: record 1 of 4 has a wrong checksum" + COPY
    )


def test_a_killed_run_cut_anywhere_in_its_last_step_keeps_the_steps_before(run, tmp_path):
    keys = make_keys(4)
    writer = RankWriter(run, 0)
    files = [run / "rank00000" / name for name in ("keys.arrow", "segment-00000.arrow")]
    for step in range(3):
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        writer.write(make_batch(step, keys))
        keys += make_keys(20)[len(keys) : len(keys) + 4]
    index = run / "rank00000" / "index.bin"
    index.write_bytes(index.read_bytes()[: -RECORD.itemsize])
    for file, size in zip(files, sizes, strict=True):
        whole = file.read_bytes()
        for length in range(size, len(whole), 1 + (len(whole) - size) // 150):
            file.write_bytes(whole[:length])
            trace = open_trace(run)
            assert [entry.step for entry in trace.steps(0)] == [0, 1]
            assert trace.read(0, 1, verify=True)
        file.write_bytes(whole)


def test_an_index_record_cut_anywhere_is_a_step_not_written(run):
    writer = RankWriter(run, 0)
    for step in range(3):
        writer.write(make_batch(step, make_keys()))
    index = run / "rank00000" / "index.bin"
    whole = index.read_bytes()
    for length in [*range(HEADER.itemsize + 4), *range(len(whole) - RECORD.itemsize, len(whole))]:
        index.write_bytes(whole[:length])
        trace = open_trace(run)
        num_steps = max(length - HEADER.itemsize, 0) // RECORD.itemsize
        assert [entry.step for entry in trace.steps(0)] == list(range(num_steps))
        assert all(trace.read(0, step, verify=True) for step in range(num_steps))


def test_ranks_of_another_run_are_not_taken_for_ours(recorded, tmp_path):
    stranger = RankWriter(tmp_path / "other", 1)
    stranger.close()
    other = Path(tmp_path / "other" / "rank00001")
    about = json.loads((other / "rank.json").read_text())
    del about["checksum"]
    (other / "rank.json").write_bytes(to_json(about | {"run_id": "another"}))
    write_manifest(recorded, Manifest(run_id_of(recorded), world_size=2))
    shutil.move(other, recorded / "rank00001")
    assert message(read_all, recorded) == (
        f"cannot read {recorded}/rank00001: it belongs to another run" + COPY
    )


def test_a_rank_under_another_number_is_not_read(recorded):
    write_manifest(recorded, Manifest(run_id_of(recorded), world_size=2))
    shutil.copytree(recorded / "rank00000", recorded / "rank00001")
    assert message(read_all, recorded) == (
        f"cannot read {recorded}/rank00001: it holds rank 0" + COPY
    )


def test_more_ranks_than_the_run_had_are_refused(recorded):
    (recorded / "rank00001").mkdir()
    assert message(open_trace, recorded) == (
        f"cannot read {recorded}/rank00001: the run has only 1 ranks" + COPY
    )


@pytest.mark.parametrize("file", [*FILES, "claim.json"])
def test_links_are_not_followed(recorded, tmp_path, file):
    path = recorded / file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert message(read_all, recorded) == (
        f"cannot read {path}: it is a symbolic link, and links are not followed" + COPY
    )


def test_a_linked_rank_directory_is_no_rank(recorded, tmp_path):
    (recorded / "rank00000").rename(tmp_path / "elsewhere")
    (recorded / "rank00000").symlink_to(tmp_path / "elsewhere")
    assert open_trace(recorded).missing_ranks == (0,)


@pytest.mark.parametrize("file", [*FILES, "claim.json"])
def test_a_named_pipe_does_not_make_the_reader_wait(recorded, file):
    path = recorded / file
    path.unlink()
    os.mkfifo(path)
    assert message(read_all, recorded) == f"cannot read {path}: it is not a regular file" + COPY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read")
@pytest.mark.parametrize("file", [*FILES, "claim.json", "."])
def test_what_may_not_be_read_is_a_sentence(recorded, file):
    for parent in recorded.parents:
        if parent.is_relative_to("/tmp/pytest-of-root"):
            parent.chmod(0o755)
    (recorded / file).chmod(0)
    pid = os.fork()
    if pid == 0:
        os.seteuid(65534)
        try:
            read_all(recorded)
        except TraceError as error:
            os._exit(0 if "permission denied" in str(error) and error.remedy else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_dump_that_was_not_made(recorded):
    path = recorded / "rank00000/tensors/a.safetensors"
    assert message(open_trace(recorded).read_tensors, 0, "a") == (
        f"cannot read {path}: the run has no dumps of this rank\n"
        "  try  record with dump switched on"
    )


def test_a_dump_with_a_flipped_bit_or_cut_off_is_refused(run):
    writer = RankWriter(run, 0)
    writer.write_tensors("a", {"x": np.arange(8.0), "y": np.ones((2, 2), np.float16)})
    writer.close()
    path = run / "rank00000/tensors/a.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for data in (bytes(flipped), whole[:place]):
            path.write_bytes(data)
            assert str(path) in message(open_trace(run).read_tensors, 0, "a")


@pytest.mark.parametrize("file", ["manifest.json", "rank00000/rank.json", "rank00000/end.json"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, "1", None, [[]], {"a": {}}])
def test_numbers_of_a_wrong_type_with_a_right_checksum_are_refused(recorded, file, value):
    path = recorded / file
    whole = json.loads(path.read_text())
    del whole["checksum"]
    for name in {"world_size", "rank", "layout", "num_steps", "complete"} & set(whole):
        if name == "num_steps" and value is None:
            continue  # a run still being written
        path.write_bytes(to_json(whole | {name: value}))
        assert str(recorded) in message(read_all, recorded)
