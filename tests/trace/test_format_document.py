"""docs/trace-format.md says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from upguard_plugin.records import MOMENTS, PHASES, ROLES
from upguard_plugin.trace import end, index, keys, segments
from upguard_plugin.trace.manifest import Manifest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()


def section(title: str) -> str:
    return re.split(r"^##+ ", DOCUMENT.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    lines = [line.strip("| \n") for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def test_the_index_record():
    sizes = {"int64": 8, "uint64": 8, "16 bytes": 16, "uint32": 4}
    documented = [
        (name.strip("`"), int(at), sizes[kind]) for at, kind, name, _ in rows("index.bin")
    ]
    fields = index.RECORD.fields
    assert documented == [(name, fields[name][1], fields[name][0].itemsize) for name in fields]
    assert f"uint32: {index.RECORD.itemsize}" in section("index.bin")


def test_the_columns_of_a_segment():
    documented = {}
    for names, kind, always, _ in rows("segment-00000.arrow"):
        for name in re.findall(r"`(\w+)`", names):
            documented[name] = (kind.removeprefix("list of K "), always)
    types = {"int32": pa.int32(), "int64": pa.int64(), "uint64": pa.uint64()}
    types["float64"] = pa.float64()
    found = {name: types[kind] for name, (kind, always) in documented.items() if always == "yes"}
    assert found == segments.REQUIRED
    found = {name: types[kind] for name, (kind, always) in documented.items() if always == "no"}
    assert found == segments.OPTIONAL


def test_the_columns_of_the_key_table():
    documented = [
        (name.strip("`"), nullable == "yes") for name, _, nullable, _ in rows("keys.arrow")
    ]
    assert documented == [(field.name, field.nullable) for field in keys.SCHEMA]
    for words in (PHASES, ROLES, MOMENTS):
        assert ", ".join(f"`{word}`" for word in words[:-1]) in section("keys.arrow")


def test_the_fields_of_the_json_files():
    documented = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows("manifest.json")))
    assert set(documented) == {"format", *Manifest.__slots__}
    documented = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows("end.json")))
    assert set(documented) == set(end.EndRecord.__slots__)
    assert f"{end.NUM_BYTES} bytes" in section("end.json")


def test_reading_and_writing_load_no_torch():
    code = (
        "import sys, upguard_plugin.trace.reader, upguard_plugin.trace.writer;"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
