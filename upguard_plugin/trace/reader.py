"""The reader: a run on disk as `EventBatch`es.

In:  the path of a run directory, finished, killed or still being written.
Out: a `Trace`, a snapshot: each rank is looked at once, when it is first asked for.

Whatever the bytes are, only `TraceError` comes out. Every byte that is decoded was first checked
against a checksum in the rank's index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa

from upguard_plugin.errors import TraceError
from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace import keys, rank_file, segments, tensors
from upguard_plugin.trace.batch import EventBatch, RankEnd, StepEntry
from upguard_plugin.trace.digest import KeyHashes, hash_keys, step_digest
from upguard_plugin.trace.end import EndRecord, read_end, read_notes
from upguard_plugin.trace.files import COPY_AGAIN, damaged, read_range
from upguard_plugin.trace.index import NAME as INDEX_NAME
from upguard_plugin.trace.index import StepRecord, read_index
from upguard_plugin.trace.manifest import Manifest, read_manifest
from upguard_plugin.trace.run_directory import (
    attempt_directories,
    rank_directories,
    rank_name,
    run_id_of,
)


def open_trace(path: Path) -> Trace:
    """Open a run for reading; reads its manifest and the names of its ranks, no more.

    Raises TraceError if there is no run, or not one that this UpGuard reads.
    """
    if not path.exists():
        raise TraceError(f"cannot read {path}: no such run", remedy="check the path")
    if not path.is_dir():
        raise TraceError(
            f"cannot read {path}: a run is a directory", remedy="name the directory of the run"
        )
    try:
        directories = rank_directories(path)
        empty = not any(os.scandir(path))
        attempts = tuple(attempt_directories(path))
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {(error.strerror or '').lower()}",
            remedy="make the directory readable (chmod u+rx), or read it as its owner",
        ) from None
    if empty:
        raise TraceError(
            f"cannot read {path}: the directory is empty",
            remedy="check the path, and whether recording was switched on",
        )
    if not directories and not (path / "manifest.json").exists():
        raise TraceError(
            f"cannot read {path}: it is not a run of UpGuard",
            evidence={"missing": "manifest.json, rank00000/"},
            remedy="name a directory that UpGuard has written",
        )
    manifest = read_manifest(path)
    strangers = [rank for rank in directories if rank >= manifest.world_size]
    if strangers:
        raise damaged(
            path / rank_name(strangers[0]), f"the run has only {manifest.world_size} ranks"
        )
    # A rank whose process was killed before it could write rank.json recorded nothing.
    present = {r: d for r, d in directories.items() if (d / rank_file.NAME).exists()}
    return Trace(path, manifest, present, attempts)


class Trace:
    """One run on disk."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        directories: Mapping[int, Path],
        attempts: tuple[Path, ...] = (),
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.ranks = tuple(directories)
        expected = manifest.recorded_ranks
        if expected is None:
            expected = tuple(range(manifest.world_size))
        self.missing_ranks = tuple(rank for rank in expected if rank not in directories)
        self.attempts = attempts  # of a restarted job: directories to open as runs of their own
        self._directories = dict(directories)
        self._loaded: dict[int, _Rank] = {}
        self._key_tables: dict[bytes, _KeyTable] = {}  # by digest: most ranks have the same
        self._run_id: str | None = None

    def layout(self, rank: int) -> Layout:
        """How the rank sat in the parallel mesh."""
        return self._rank(rank).about.layout

    def device(self, rank: int) -> str:
        """The device that the rank computed on."""
        return self._rank(rank).about.device

    def steps(self, rank: int) -> tuple[StepEntry, ...]:
        """What the rank recorded, step by step; a step that was being written is not there."""
        return tuple(record.entry for record in self._rank(rank).records.values())

    def end(self, rank: int) -> RankEnd:
        """Whether the rank's trace is complete, or why not, and its notes."""
        loaded = self._rank(rank)
        notes = read_notes(loaded.directory, loaded.end)
        return RankEnd(loaded.end.complete, loaded.end.reason, notes)

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        """All events of a rank in a step. Columns are read-only; `keys` is the rank's whole table.

        verify: also compute the step's digest anew and compare it with the index.
        Raises TraceError if the step is not there, or its bytes are not what was written.
        """
        return self._rank(rank).read(step, verify=verify)

    def has_tensors(self, rank: int, name: str) -> bool:
        """Whether the rank has a dump of that name."""
        return tensors.has_tensors(self._rank(rank).directory, name)

    def read_tensors(self, rank: int, name: str) -> dict[str, np.ndarray]:
        """The arrays of a dump, as `RankWriter.write_tensors` got them."""
        return tensors.read_tensors(self._rank(rank).directory, name)

    def _rank(self, rank: int) -> _Rank:
        loaded = self._loaded.get(rank)
        if loaded is None:
            loaded = self._loaded[rank] = self._load(rank)
        return loaded

    def _load(self, rank: int) -> _Rank:
        directory = self._directories.get(rank)
        if directory is None:
            raise TraceError(
                f"cannot read rank {rank} of {self.path}: it has no trace",
                evidence={"found": f"ranks {', '.join(map(str, self.ranks)) or 'none'}"},
                remedy=f"copy {rank_name(rank)} from where it was recorded, or leave the rank out",
            )
        if self._run_id is None:
            self._run_id = run_id_of(self.path)
        loaded = _load_rank(directory, self._key_tables)
        if loaded.about.rank != rank:
            raise damaged(directory, f"it holds rank {loaded.about.rank}")
        if loaded.about.run_id and self._run_id and loaded.about.run_id != self._run_id:
            raise damaged(directory, "it belongs to another run")
        return loaded


def _load_rank(directory: Path, key_tables: dict[bytes, _KeyTable]) -> _Rank:
    about = rank_file.read(directory)
    # The end first: a run still being written may add steps between the two reads.
    end = read_end(directory)
    records, index_crc = read_index(directory)
    if end.num_steps is not None and (end.num_steps, end.index_crc) != (len(records), index_crc):
        raise damaged(
            directory / INDEX_NAME, f"it holds {len(records)} steps, {end.num_steps} were written"
        )
    by_step = {record.entry.step: record for record in records}
    return _Rank(directory, about, end, by_step, key_tables)


@dataclass(slots=True)
class _KeyTable:
    keys: tuple[EventKey, ...]
    hashes: KeyHashes | None = None  # made when a digest is verified


@dataclass(slots=True)
class _Rank:
    """What was read of one rank so far."""

    directory: Path
    about: rank_file.RankFile
    end: EndRecord
    records: dict[int, StepRecord]
    key_tables: dict[bytes, _KeyTable]
    schemas: dict[int, pa.Schema] = field(default_factory=dict)  # by segment
    key_table: _KeyTable | None = None

    def read(self, step: int, *, verify: bool) -> EventBatch:
        record = self.records.get(step)
        if record is None:
            raise TraceError(
                f"cannot read step {step} of {self.directory}: it was not recorded",
                evidence={"recorded": _span(list(self.records))},
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

    def _load_keys(self) -> _KeyTable:
        if self.key_table is None:
            last = next(reversed(self.records.values()))
            path = self.directory / keys.NAME
            data = _checked(path, 0, last.keys_bytes, last.keys_crc)
            digest = blake2b(data).digest()
            if digest not in self.key_tables:
                table = _KeyTable(keys.decode_keys(data, last.num_keys, path))
                self.key_tables[digest] = table
            self.key_table = self.key_tables[digest]
        return self.key_table

    def _verify(
        self, batch: EventBatch, entry: StepEntry, key_table: _KeyTable, path: Path
    ) -> None:
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


def _span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
