"""`index.bin`: one fixed record per step, appended after the step's events are in their segment.

A step exists for readers when its record does. Each record ends with a checksum of itself and all
records before it, so one that was removed or moved is noticed like one that was changed. Checksums
are not part of what later ones cover: a CRC forgets everything before its own value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from upguard_plugin.records import SCHEMA_VERSION
from upguard_plugin.trace.batch import StepEntry
from upguard_plugin.trace.files import damaged, read_whole
from upguard_plugin.trace.manifest import refuse_other_schema

NAME = "index.bin"
MAGIC = b"UPGINDEX"
NO_ITERATION = -(1 << 63)
MARKS: tuple[str | None, ...] = (None, "skipped", "rerun")

RECORD = np.dtype(
    [
        ("step", "<i8"),
        ("iteration", "<i8"),  # NO_ITERATION where the framework has no number
        ("offset", "<u8"),  # of the record batch in its segment
        ("length", "<u8"),  # of the record batch, in bytes
        ("num_events", "<u8"),
        ("keys_bytes", "<u8"),  # length of keys.arrow when the step was written
        ("digest", "V16"),
        ("mark", "<u4"),  # place in MARKS
        ("segment", "<u4"),  # number of the segment file
        ("head_bytes", "<u4"),  # length of the segment's schema message
        ("head_crc", "<u4"),
        ("batch_crc", "<u4"),  # of the record batch
        ("keys_crc", "<u4"),  # of the first keys_bytes of keys.arrow
        ("num_keys", "<u4"),  # rows in those bytes
        ("chain_crc", "<u4"),  # of the header and all records up to here without their chain_crc
    ]
)
HEADER = np.dtype([("magic", "S8"), ("schema_version", "<u4"), ("record_bytes", "<u4")])
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One record: the step's entry, and where its events lie."""

    entry: StepEntry
    segment: int
    offset: int
    length: int
    head_bytes: int
    head_crc: int
    batch_crc: int
    num_keys: int
    keys_bytes: int
    keys_crc: int


def header_bytes() -> bytes:
    return np.array((MAGIC, SCHEMA_VERSION, RECORD.itemsize), dtype=HEADER).tobytes()


def chain_crc_of(data: bytes) -> int:
    """The checksum that goes on with the next record; data: the header or the last record."""
    return (
        int.from_bytes(data[-_CRC_BYTES:], "little") if len(data) > HEADER.itemsize else crc32(data)
    )


def record_bytes(record: StepRecord, crc: int) -> bytes:
    """The bytes of one record. crc: `chain_crc` of the record before it, see `chain_crc_of`."""
    entry = record.entry
    row = np.zeros((), dtype=RECORD)
    row["step"] = entry.step
    row["iteration"] = NO_ITERATION if entry.iteration is None else entry.iteration
    row["mark"] = MARKS.index(entry.mark)
    row["num_events"] = entry.num_events
    row["digest"] = np.void(entry.digest)
    for name in RECORD.names or ():
        if name in StepRecord.__slots__:
            row[name] = getattr(record, name)
    body = row.tobytes()[:-_CRC_BYTES]
    return body + crc32(body, crc).to_bytes(_CRC_BYTES, "little")


def read_index(directory: Path) -> tuple[list[StepRecord], int]:
    """All whole records of a rank's index, and the checksum of the last of them.

    A last record that is cut off belongs to a step that was being written: it does not count.
    Raises TraceError for another schema, changed or missing records.
    """
    path = directory / NAME
    data = read_whole(path)
    if len(data) < HEADER.itemsize and header_bytes().startswith(data):
        return [], crc32(header_bytes())  # killed while the file was made
    head = np.frombuffer(data[: HEADER.itemsize].ljust(HEADER.itemsize, b"\0"), dtype=HEADER)[0]
    if head["magic"] != MAGIC:
        raise damaged(path, "it is not an index of UpGuard, or its start is damaged")
    refuse_other_schema(int(head["schema_version"]), path)
    if head["record_bytes"] != RECORD.itemsize:
        raise damaged(path, "its start is damaged")
    num_records = (len(data) - HEADER.itemsize) // RECORD.itemsize
    data = data[: HEADER.itemsize + num_records * RECORD.itemsize]
    rows = np.frombuffer(data, dtype=RECORD, offset=HEADER.itemsize)
    crc = _check_chain(data, num_records, path)
    if num_records and not bool(np.all(np.diff(rows["step"]) > 0)):
        raise damaged(path, "its steps are not in order")
    return [_record(row, path) for row in rows], crc


def _check_chain(data: bytes, num_records: int, path: Path) -> int:
    crc = crc32(data[: HEADER.itemsize])
    for place in range(num_records):
        start = HEADER.itemsize + place * RECORD.itemsize
        end = start + RECORD.itemsize - _CRC_BYTES
        crc = crc32(data[start:end], crc)
        if crc.to_bytes(_CRC_BYTES, "little") != data[end : end + _CRC_BYTES]:
            raise damaged(path, f"record {place} of {num_records} has a wrong checksum")
    return crc


def _record(row: np.void, path: Path) -> StepRecord:
    mark = int(row["mark"])
    if mark >= len(MARKS):
        raise damaged(path, f"unknown mark {mark}")
    iteration = int(row["iteration"])
    entry = StepEntry(
        step=int(row["step"]),
        iteration=None if iteration == NO_ITERATION else iteration,
        mark=MARKS[mark],
        num_events=int(row["num_events"]),
        digest=row["digest"].tobytes(),
    )
    return StepRecord(
        entry=entry,
        segment=int(row["segment"]),
        offset=int(row["offset"]),
        length=int(row["length"]),
        head_bytes=int(row["head_bytes"]),
        head_crc=int(row["head_crc"]),
        batch_crc=int(row["batch_crc"]),
        num_keys=int(row["num_keys"]),
        keys_bytes=int(row["keys_bytes"]),
        keys_crc=int(row["keys_crc"]),
    )
