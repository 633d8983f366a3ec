"""`index.bin`: one fixed record per step, appended after the step's events are in their segment.

A step exists for readers when its record does. Each record ends with a checksum of itself and all
records before it, so one that was removed or moved is noticed like one that was changed. Checksums
are not part of what later ones cover: a CRC forgets everything before its own value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from zlib import crc32

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import SCHEMA_VERSION
from upguard_plugin.trace.batch import StepEntry
from upguard_plugin.trace.files import damaged, read_whole
from upguard_plugin.trace.manifest import refuse_other_schema
from upguard_plugin.trace.step_table import MARKS, NO_ITERATION, StepTable

NAME = "index.bin"
MAGIC = b"UPGINDEX"

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
_BODY_AND_CRC = Struct(f"<{RECORD.itemsize - _CRC_BYTES}sI")
_MOST_EVENTS = 1 << 40  # of a step; more cannot have been recorded, and sums stay exact


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


@dataclass(frozen=True, slots=True)
class Index:
    """The records of one rank, as they lie in the file: 96 bytes a step."""

    rows: npt.NDArray[np.void]  # of RECORD
    crc: int  # of the last record, or of the header

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> Index:
        """The first `count` of them."""
        return self if count >= len(self) else Index(self.rows[:count], self.crc)

    def steps(self) -> StepTable:
        """What they say of the steps."""
        rows = self.rows
        return StepTable(
            rows["step"].astype(np.int64),
            rows["iteration"].astype(np.int64),
            rows["num_events"].astype(np.int64),
            np.frombuffer(rows["digest"].tobytes(), "<u8").reshape(-1, 2),
            rows["mark"].astype(np.uint32),
        )

    def record(self, place: int) -> StepRecord:
        """One of them."""
        row = self.rows[place]
        iteration = int(row["iteration"])
        entry = StepEntry(
            step=int(row["step"]),
            iteration=None if iteration == NO_ITERATION else iteration,
            mark=MARKS[int(row["mark"])],
            num_events=int(row["num_events"]),
            digest=row["digest"].tobytes(),
        )
        return StepRecord(entry, *(int(row[name]) for name in StepRecord.__slots__[1:]))

    def record_of(self, step: int) -> StepRecord | None:
        """The record of a step, or None where there is none."""
        place = int(np.searchsorted(self.rows["step"], step))
        found = place < len(self) and int(self.rows["step"][place]) == step
        return self.record(place) if found else None


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


def read_index(directory: Path) -> Index:
    """All whole records of a rank's index.

    A last record that is cut off belongs to a step that was being written: it does not count.
    Raises TraceError for another schema, changed or missing records.
    """
    path = directory / NAME
    data = read_whole(path)
    if len(data) < HEADER.itemsize and header_bytes().startswith(data):
        return Index(np.empty(0, RECORD), crc32(header_bytes()))  # killed while the file was made
    head = np.frombuffer(data[: HEADER.itemsize].ljust(HEADER.itemsize, b"\0"), dtype=HEADER)[0]
    if head["magic"] != MAGIC:
        raise damaged(path, "it is not an index of UpGuard, or its start is damaged")
    refuse_other_schema(int(head["schema_version"]), path)
    if head["record_bytes"] != RECORD.itemsize:
        raise damaged(path, "its start is damaged")
    num_records = (len(data) - HEADER.itemsize) // RECORD.itemsize
    records = memoryview(data)[HEADER.itemsize :][: num_records * RECORD.itemsize]
    crc = _check_chain(records, crc32(data[: HEADER.itemsize]), path)
    rows = np.frombuffer(records, dtype=RECORD)
    _check_values(rows, path)
    return Index(rows, crc)


def _check_chain(records: memoryview, crc: int, path: Path) -> int:
    for place, (body, expected) in enumerate(_BODY_AND_CRC.iter_unpack(records)):
        crc = crc32(body, crc)
        if crc != expected:
            num_records = len(records) // RECORD.itemsize
            raise damaged(path, f"record {place} of {num_records} has a wrong checksum")
    return crc


def _check_values(rows: npt.NDArray[np.void], path: Path) -> None:
    if not len(rows):
        return
    if not bool((rows["step"][1:] > rows["step"][:-1]).all()):
        raise damaged(path, "its steps are not in order")
    if int(rows["mark"].max()) >= len(MARKS):
        raise damaged(path, f"unknown mark {int(rows['mark'].max())}")
    if int(rows["num_events"].max()) > _MOST_EVENTS:
        raise damaged(path, f"a step of {int(rows['num_events'].max())} events")
