from __future__ import annotations

import json

import pytest

from upguard_plugin.errors import RunDirectoryError, TraceError
from upguard_plugin.trace.files import to_json
from upguard_plugin.trace.manifest import Manifest, read_manifest, write_manifest

FULL = Manifest(
    run_id="abc",
    command=("python", "train.py", "--token", "<redacted>"),
    config={"level": "op", "steps": None, "modules": ["a.*"]},
    program_digest="0f" * 16,
    program="flipped",
    sources={"/home/zoë/train.py": "12"},
    world_size=4,
    level="op",
    versions={"torch": "2.13.0"},
    variables={"NCCL_ALGO": "Ring"},
    devices={"0": "cpu"},
    started_at="2026-01-02T03:04:05+00:00",
    notes=("no cache",),
    recorded_ranks=(0, 2),
)


@pytest.mark.parametrize("manifest", [FULL, Manifest("x")])
def test_a_manifest_is_read_as_it_was_written(tmp_path, manifest):
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


def test_a_manifest_is_plain_json(tmp_path):
    write_manifest(tmp_path, FULL)
    assert json.loads((tmp_path / "manifest.json").read_text())["command"] == list(FULL.command)


def write_changed(tmp_path, **fields):
    write_manifest(tmp_path, FULL)
    path = tmp_path / "manifest.json"
    old = json.loads(path.read_text())
    del old["checksum"]
    path.write_bytes(to_json(old | fields))


def test_a_newer_schema_is_refused_in_clear_words(tmp_path):
    write_changed(tmp_path, schema_version=2, field_of_the_future=1)
    with pytest.raises(TraceError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value) == (
        f"cannot read {tmp_path}/manifest.json: its schema is newer than this UpGuard\n"
        "  file     schema 2\n"
        "  UpGuard  schema 1\n"
        "  try      read it with the UpGuard that recorded it, or a later one"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"schema_version": 0},
        {"schema_version": True},
        {"schema_version": None},
        {"command": "python"},
        {"command": [1]},
        {"world_size": -1},
        {"world_size": "2"},
        {"level": "deep"},
        {"sources": ["a"]},
        {"recorded_ranks": 3},
        {"unknown": 1},
        {"format": "other"},
    ],
)
def test_a_field_of_a_wrong_type_is_refused(tmp_path, fields):
    write_changed(tmp_path, **fields)
    with pytest.raises(TraceError, match=r"cannot read .*manifest.json: "):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ['{"name": "other tool"}', "[]", "", "\x00", "[" * 100_000, "1e9"])
def test_a_manifest_of_another_tool_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(TraceError) as caught:
        read_manifest(tmp_path)
    assert caught.value.sentence == (
        f"cannot read {tmp_path}/manifest.json: it is not a file of UpGuard, or it is damaged"
    )


def test_an_edited_manifest_is_refused(tmp_path):
    write_manifest(tmp_path, FULL)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"flipped"', '"flopped"'))
    with pytest.raises(TraceError, match="its checksum is wrong"):
        read_manifest(tmp_path)


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"cannot write .*nowhere/manifest.json: "):
        write_manifest(tmp_path / "nowhere", FULL)
