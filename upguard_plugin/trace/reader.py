"""The reader: a run on disk as `EventBatch`es.

In:  the path of a run directory, finished, killed or still being written.
Out: a `Trace`, a snapshot: each rank is looked at once, when it is first asked for.

Whatever the bytes are, only `TraceError` comes out. Every byte that is decoded was first checked
against a checksum in the rank's index.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import cached_property
from pathlib import Path

import numpy as np

from upguard_plugin.errors import TraceError
from upguard_plugin.records import Layout
from upguard_plugin.trace import rank_file, tensors
from upguard_plugin.trace.batch import EventBatch, RankEnd
from upguard_plugin.trace.end import EndRecord, read_end, read_notes
from upguard_plugin.trace.files import damaged
from upguard_plugin.trace.index import NAME as INDEX_NAME
from upguard_plugin.trace.index import read_index
from upguard_plugin.trace.manifest import Manifest, read_manifest
from upguard_plugin.trace.rank_reader import KeyTables, RankReader
from upguard_plugin.trace.run_directory import (
    attempt_directories,
    rank_directories,
    rank_name,
    run_id_of,
)
from upguard_plugin.trace.step_table import StepTable

_KEPT_RECORDS = 1 << 20  # of all ranks together, 100 MB; what is needed again is read again


def open_trace(path: Path, key_tables: KeyTables | None = None) -> Trace:
    """Open a run for reading; reads its manifest and the names of its ranks, no more.

    key_tables: decoded ones, to share between runs; most ranks of both runs have the same.
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
    return Trace(path, manifest, tuple(directories), attempts, key_tables)


class Trace:
    """One run on disk."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        listed_ranks: tuple[int, ...],
        attempts: tuple[Path, ...] = (),
        key_tables: KeyTables | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.listed_ranks = listed_ranks  # that have a directory
        self._listed = frozenset(listed_ranks)
        self.attempts = attempts  # of a restarted job: directories to open as runs of their own
        self._about: dict[int, rank_file.RankFile] = {}
        self._axis_ranks: dict[tuple[int, ...], tuple[int, ...]] = {}  # each kept once
        self._ends: dict[int, EndRecord] = {}
        self._loaded: OrderedDict[int, RankReader] = OrderedDict()  # used last: at the end
        self._num_kept = 0  # records of these
        self._num_steps: dict[int, int] = {}  # of each rank when it was first looked at
        self._key_tables: KeyTables = {} if key_tables is None else key_tables
        self._run_id: str | None = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded something; looks at the directory of each."""
        return tuple(rank for rank in self.listed_ranks if self.has_trace(rank))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that were to be recorded and are not there."""
        return self.manifest.missing_ranks(self.ranks)

    def has_trace(self, rank: int) -> bool:
        """Whether the rank, which has a directory, recorded something."""
        return rank_file.exists(self.path / rank_name(rank))

    def layout(self, rank: int) -> Layout:
        """How the rank sat in the parallel mesh."""
        return self._rank_file(rank).layout

    def device(self, rank: int) -> str:
        """The device that the rank computed on."""
        return self._rank_file(rank).device

    def steps(self, rank: int) -> StepTable:
        """What the rank recorded, step by step; a step that was being written is not there."""
        return self._rank(rank).index.steps()

    def end(self, rank: int) -> RankEnd:
        """Whether the rank's trace is complete, or why not, and its notes."""
        end = self._end(rank)
        return RankEnd(end.complete, end.reason, read_notes(self._directory(rank), end))

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        """All events of a rank in a step. Columns are read-only; `keys` is the rank's whole table.

        verify: also compute the step's digest anew and compare it with the index.
        Raises TraceError if the step is not there, or its bytes are not what was written.
        """
        return self._rank(rank).read(step, verify=verify)

    def has_tensors(self, rank: int, name: str) -> bool:
        """Whether the rank has a dump of that name."""
        return tensors.has_tensors(self._directory(rank), name)

    def read_tensors(self, rank: int, name: str) -> dict[str, np.ndarray]:
        """The arrays of a dump, as `RankWriter.write_tensors` got them."""
        return tensors.read_tensors(self._directory(rank), name)

    def _directory(self, rank: int) -> Path:
        if rank not in self._listed:
            raise TraceError(
                f"cannot read rank {rank} of {self.path}: it has no trace",
                evidence={"found": f"ranks {', '.join(map(str, self.ranks)) or 'none'}"},
                remedy=f"copy {rank_name(rank)} from where it was recorded, or leave the rank out",
            )
        return self.path / rank_name(rank)

    def _rank_file(self, rank: int) -> rank_file.RankFile:
        about = self._about.get(rank)
        if about is None:
            directory = self._directory(rank)
            about = rank_file.read(directory, self._axis_ranks)
            if self._run_id is None:
                self._run_id = run_id_of(self.path)
            if about.rank != rank:
                raise damaged(directory, f"it holds rank {about.rank}")
            if about.run_id and self._run_id and about.run_id != self._run_id:
                raise damaged(directory, "it belongs to another run")
            self._about[rank] = about
        return about

    def _end(self, rank: int) -> EndRecord:
        end = self._ends.get(rank)
        if end is None:
            self._rank_file(rank)
            end = self._ends[rank] = read_end(self._directory(rank))
        return end

    def _rank(self, rank: int) -> RankReader:
        loaded = self._loaded.get(rank)
        if loaded is None:
            loaded = self._loaded[rank] = self._load(rank)
            self._num_kept += len(loaded.index)
            while self._num_kept > _KEPT_RECORDS and len(self._loaded) > 1:
                self._num_kept -= len(self._loaded.popitem(last=False)[1].index)
        self._loaded.move_to_end(rank)
        return loaded

    def _load(self, rank: int) -> RankReader:
        # The end first: a run still being written may add steps between the two reads.
        end, directory = self._end(rank), self._directory(rank)
        index = read_index(directory)
        known = self._num_steps.setdefault(rank, len(index))
        if end.num_steps is not None and (end.num_steps, end.index_crc) != (len(index), index.crc):
            raise damaged(
                directory / INDEX_NAME, f"it holds {len(index)} steps, {end.num_steps} were written"
            )
        return RankReader(directory, index.first(known), self._key_tables)
