"""Mutated runs: whatever the bytes, reading gives the right events or an error of ours."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.sample_events import make_batch, make_keys, same
from upguard_plugin.errors import UpGuardError
from upguard_plugin.trace.files import to_json
from upguard_plugin.trace.index import HEADER, RECORD
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.tensors import read_tensors, write_tensors
from upguard_plugin.trace.writer import RankWriter

NUM_STEPS = 3
NUM_EXAMPLES = int(os.environ.get("UPGUARD_FUZZ_EXAMPLES", "50"))
FILES = ["keys.arrow", "segment-00000.arrow", "index.bin", "rank.json", "end.json", "notes.txt"]
JSON_FILES = ["manifest.json", "rank00000/rank.json", "rank00000/end.json"]


def expected(step: int):
    return make_batch(step, make_keys(), num_events=40)


@pytest.fixture(scope="module", params=["closed", "killed"])
def original(tmp_path_factory, request) -> Path:
    run = claim_run_directory(tmp_path_factory.mktemp("fuzz") / "run", rank=0, run_token=None)
    write_manifest(run, Manifest(run_id_of(run), ("python", "train.py"), config={"a": [1, None]}))
    writer = RankWriter(run, 0)
    for step in range(NUM_STEPS):
        writer.write(expected(step))
    writer.note("a note")
    if request.param == "closed":
        writer.close()
    return run


def read_or_refuse(run: Path) -> None:
    """Read everything; only errors of ours may come out, and only events that were recorded."""
    try:
        trace = open_trace(run)
        for rank in trace.ranks:
            trace.layout(rank)
            trace.end(rank)
            for entry in trace.steps(rank):
                batch = trace.read(rank, entry.step, verify=True)
                assert same(batch, expected(entry.step))
    except UpGuardError as error:
        assert error.sentence
        assert error.remedy


mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "cut", "insert", "drop", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, steps) -> bytes:
    for kind, where, other, byte in steps:
        if not data:
            return data
        place, second = sorted((int(where * len(data)), int(other * len(data))))
        if kind == "flip":
            data = data[:place] + bytes([data[place] ^ (byte or 1)]) + data[place + 1 :]
        elif kind == "set":
            data = data[:place] + bytes([byte]) * 4 + data[place + 4 :]
        elif kind == "cut":
            data = data[:place]
        elif kind == "insert":
            data = data[:place] + bytes([byte] * 9) + data[place:]
        elif kind == "drop":
            data = data[:place] + data[second:]
        else:
            data = data[:place] + data[second:] + data[place:second]
    return data


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(file=st.sampled_from([*FILES, "../manifest.json", "../claim.json"]), steps=mutations)
def test_a_mutated_file_gives_the_right_events_or_an_error(original, file, steps):
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        shutil.copytree(original, run)
        path = (run / "rank00000" / file).resolve()
        path.write_bytes(mutate(path.read_bytes(), steps))
        read_or_refuse(run)


DUMP = {
    "out": np.arange(12.0).reshape(3, 4),
    "args.0": np.ones((2, 2), np.float16),
    "n": np.array(7),
}


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(steps=mutations)
def test_a_mutated_dump_gives_the_right_arrays_or_an_error(steps):
    with tempfile.TemporaryDirectory() as scratch:
        write_tensors(Path(scratch), "step1", DUMP)
        (path,) = (Path(scratch) / "tensors").iterdir()
        path.write_bytes(mutate(path.read_bytes(), steps))
        try:
            found = read_tensors(Path(scratch), "step1")
        except UpGuardError as error:
            assert error.remedy
            return
        assert found.keys() == DUMP.keys()
        assert all(np.array_equal(found[name], DUMP[name]) for name in DUMP)


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(
    name=st.text(min_size=1) | st.sampled_from(["..", "../../x", "/etc/passwd", "a\0b", ".", "~"])
)
def test_a_dump_of_any_name_stays_in_its_folder(name):
    with tempfile.TemporaryDirectory() as scratch:
        rank = Path(scratch) / "run" / "rank00000"
        rank.mkdir(parents=True)
        try:
            write_tensors(rank, name, DUMP)
        except UnicodeEncodeError:  # half a character: no name of a module
            return
        (path,) = (path for path in Path(scratch).rglob("*") if path.is_file())
        assert path.parent == rank / "tensors"
        assert read_tensors(rank, name).keys() == DUMP.keys()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(file=st.sampled_from(JSON_FILES), pick=st.integers(0, 99), value=json_values)
def test_a_json_field_of_any_value_with_a_right_checksum_is_no_crash(original, file, pick, value):
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        shutil.copytree(original, run)
        fields = json.loads((run / file).read_text())
        del fields["checksum"]
        fields[sorted(fields)[pick % len(fields)]] = value
        (run / file).write_bytes(to_json(fields))
        read_or_refuse(run)


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(file=st.sampled_from(["keys.arrow", "segment-00000.arrow"]), steps=mutations)
def test_mutated_arrow_bytes_with_right_checksums_are_no_crash(original, file, steps):
    """As above, but a hostile hand has made all our checksums right again."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        shutil.copytree(original, run)
        path = run / "rank00000" / file
        path.write_bytes(mutate(path.read_bytes(), steps))
        forge_checksums(run / "rank00000")
        trace = open_trace(run)
        for entry in trace.steps(0):
            try:
                trace.read(0, entry.step, verify=True)
            except UpGuardError as error:
                assert error.remedy


def forge_checksums(rank: Path) -> None:
    data = bytearray((rank / "index.bin").read_bytes())
    keys = (rank / "keys.arrow").read_bytes()
    segment = (rank / "segment-00000.arrow").read_bytes()
    rows = np.frombuffer(data, dtype=RECORD, offset=HEADER.itemsize)
    for row in rows:
        start, length = int(row["offset"]), int(row["length"])
        row["head_crc"] = crc32(segment[: int(row["head_bytes"])])
        row["batch_crc"] = crc32(segment[start : start + length])
        row["keys_crc"] = crc32(keys[: int(row["keys_bytes"])])
    rechain(data)
    (rank / "index.bin").write_bytes(data)
    end = json.loads((rank / "end.json").read_text())
    if end["num_steps"] is not None:
        del end["checksum"]
        end["index_crc"] = int.from_bytes(data[-4:], "little")
        (rank / "end.json").write_bytes(to_json(end))


def rechain(data: bytearray) -> None:
    crc = crc32(data[: HEADER.itemsize])
    for start in range(HEADER.itemsize, len(data), RECORD.itemsize):
        end = start + RECORD.itemsize - 4
        crc = crc32(data[start:end], crc)
        data[end : end + 4] = crc.to_bytes(4, "little")


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
@given(steps=mutations)
def test_a_mutated_index_with_right_checksums_is_no_crash(original, steps):
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        shutil.copytree(original, run)
        path = run / "rank00000" / "index.bin"
        whole = path.read_bytes()
        body = mutate(whole[HEADER.itemsize :], steps)
        data = bytearray(
            whole[: HEADER.itemsize] + body[: len(body) // RECORD.itemsize * RECORD.itemsize]
        )
        rechain(data)
        path.write_bytes(data)
        try:
            trace = open_trace(run)
            for entry in trace.steps(0):
                trace.read(0, entry.step, verify=True)
        except UpGuardError as error:
            assert error.remedy
