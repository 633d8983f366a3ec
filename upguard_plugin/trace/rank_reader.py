"""One rank's events: from its index to an `EventBatch`.

In:  the directory of a rank, and its index, which was checked already.
Out: batches; every byte that is decoded was first checked against a checksum in the index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa

from upguard_plugin.errors import TraceError
from upguard_plugin.records import EventKey
from upguard_plugin.trace import keys, segments
from upguard_plugin.trace.batch import EventBatch, StepEntry
from upguard_plugin.trace.digest import KeyHashes, hash_keys, step_digest
from upguard_plugin.trace.files import COPY_AGAIN, damaged, read_range
from upguard_plugin.trace.index import Index, StepRecord


@dataclass(slots=True)
class KeyTable:
    keys: tuple[EventKey, ...]
    hashes: KeyHashes | None = None  # made when a digest is verified


KeyTables = dict[bytes, KeyTable]  # by the digest of their bytes


@dataclass(slots=True)
class RankReader:
    """What was read of one rank so far."""

    directory: Path
    index: Index
    key_tables: KeyTables
    schemas: dict[int, pa.Schema] = field(default_factory=dict)  # by segment
    key_table: KeyTable | None = None

    def read(self, step: int, *, verify: bool) -> EventBatch:
        record = self.index.record_of(step)
        if record is None:
            raise TraceError(
                f"cannot read step {step} of {self.directory}: it was not recorded",
                evidence={"recorded": _span(self.index)},
                remedy="name a recorded step",
            )
        path = self.directory / segments.segment_name(record.segment)
        schema = self._schema(record, path)
        body = _checked(path, record.offset, record.length, record.batch_crc)
        columns = segments.decode(body, schema, record.entry.num_events, path)
        key_table = self._load_keys()
        key = columns["key"]
        if len(key) and not 0 <= int(key.min()) <= int(key.max()) < record.num_keys:
            raise damaged(path, "an event has a key that is not in the key table")
        entry = record.entry
        batch = EventBatch(
            step=step, keys=key_table.keys, iteration=entry.iteration, mark=entry.mark, **columns
        )
        if verify:
            self._verify(batch, entry, key_table, path)
        return batch

    def _schema(self, record: StepRecord, path: Path) -> pa.Schema:
        schema = self.schemas.get(record.segment)
        if schema is None:
            head = _checked(path, 0, record.head_bytes, record.head_crc)
            schema = self.schemas[record.segment] = segments.decode_schema(head, path)
        return schema

    def _load_keys(self) -> KeyTable:
        if self.key_table is None:
            last = self.index.record(len(self.index) - 1)
            path = self.directory / keys.NAME
            data = _checked(path, 0, last.keys_bytes, last.keys_crc)
            digest = blake2b(data).digest()
            if digest not in self.key_tables:
                table = KeyTable(keys.decode_keys(data, last.num_keys, path))
                self.key_tables[digest] = table
            self.key_table = self.key_tables[digest]
        return self.key_table

    def _verify(self, batch: EventBatch, entry: StepEntry, key_table: KeyTable, path: Path) -> None:
        if key_table.hashes is None:
            key_table.hashes = hash_keys(key_table.keys)
        if not bool(np.all(np.diff(batch.seq) > 0)):
            raise damaged(path, f"the events of step {entry.step} are not in program order")
        if step_digest(batch, key_table.hashes) != entry.digest:
            raise damaged(path, f"the events of step {entry.step} do not have its digest")


def _checked(path: Path, offset: int, length: int, crc: int) -> bytes:
    data = read_range(path, offset, length)
    if crc32(data) != crc:
        raise damaged(
            path, f"bytes {offset} to {offset + length} have a wrong checksum", COPY_AGAIN
        )
    return data


def _span(index: Index) -> str:
    if not len(index):
        return "no step"
    steps = index.rows["step"]
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
