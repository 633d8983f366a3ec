"""The writer: one rank's batches to its directory, so that a killed process loses next to nothing.

In:  an `EventBatch` per step, from the recorder's background thread.
Out: `<run>/rank00000/`; docs/trace-format.md describes every file in it.

A step is there for readers once its record is in the index, which is the last thing written.
Trouble with the disk stops the recording, never the training: `stopped` says why, and so does the
trace.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np

from upguard_plugin.errors import RunDirectoryError
from upguard_plugin.records import Layout
from upguard_plugin.trace import index, keys, rank_file, segments
from upguard_plugin.trace.batch import EventBatch, StepEntry
from upguard_plugin.trace.digest import hash_keys, step_digest
from upguard_plugin.trace.end import NAME as END_NAME
from upguard_plugin.trace.end import (
    NOTES_NAME,
    NUM_BYTES,
    STILL_RUNNING,
    EndFile,
    EndRecord,
    note_bytes,
)
from upguard_plugin.trace.files import AppendFile
from upguard_plugin.trace.key_numbers import KeyNumbers
from upguard_plugin.trace.run_directory import rank_name, run_id_of
from upguard_plugin.trace.tensors import write_tensors

SEGMENT_BYTES = 256 << 20  # a segment is closed by the first step that ends beyond this
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # as Arrow ends a stream


@dataclass(frozen=True, slots=True)
class _Segment:
    number: int
    file: AppendFile
    head_crc: int


class RankWriter:
    """Writes the trace of one rank. Its methods may be called from several threads."""

    def __init__(
        self,
        run: Path,
        rank: int,
        *,
        layout: Layout = Layout(),  # noqa: B008 (frozen)
        device: str = "cpu",
        max_bytes: int | None = None,
    ) -> None:
        """Begin the rank's trace in `<run>/rank<rank>`, which may exist but must hold no trace.

        max_bytes: for this rank's directory; the step that would exceed it is not written, nor are
        those after it. Raises RunDirectoryError if the directory is in use or cannot be written.
        """
        self.directory = run / rank_name(rank)
        self.bytes_written = 0
        self._max_bytes = max_bytes
        self._stopped: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._numbers = KeyNumbers()
        self._key_table = keys.KeyTable()
        self._hashes = hash_keys([])  # of the keys in the file
        self._segments: dict[bytes, _Segment] = {}  # open ones, by their schema message
        self._num_segments = self._num_steps = self._num_notes = 0
        self._files = ExitStack()  # closes those that live as long as the writer
        try:
            self._begin(run, rank, layout, device)
        except OSError as error:
            self._files.close()
            raise _cannot_begin(error, self.directory) from None

    def _begin(self, run: Path, rank: int, layout: Layout, device: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._end = EndFile(self.directory / END_NAME)
        self._files.callback(self._end.close)
        self._end.write(EndRecord(complete=False, reason=STILL_RUNNING))
        self._keys = self._append_file(keys.NAME)
        self._index = self._append_file(index.NAME)
        self._notes = self._append_file(NOTES_NAME)
        head = index.header_bytes()
        self._index.append(head)
        self._index_crc = index.chain_crc_of(head)
        # Last: a directory without it was killed before it held anything.
        about = rank_file.RankFile(run_id_of(run), rank, device, layout)
        self.bytes_written = NUM_BYTES + self._index.size + rank_file.write(self.directory, about)

    def _append_file(self, name: str) -> AppendFile:
        file = AppendFile(self.directory / name)
        self._files.callback(file.close)
        return file

    @property
    def stopped(self) -> str | None:
        """Why recording has stopped, or None while it goes on."""
        return self._stopped

    def write(self, batch: EventBatch) -> None:
        """Append one step; once this returns, a killed process does not lose it.

        The key table of the rank is best passed as the same list every step: only its new rows are
        then looked at. Steps must increase. Does nothing once recording has stopped.
        """
        with self._lock:
            if self._stopped is not None or self._closed:
                return
            try:
                self._write(batch)
            except OSError as error:
                self._stop(f"{_trouble(error)}: recording stopped before step {batch.step}")
            except BaseException:
                # Keys may be numbered that the file does not have: what follows would be wrong.
                self._stop(f"an error inside UpGuard: recording stopped before step {batch.step}")
                raise

    def _write(self, batch: EventBatch) -> None:
        key = self._numbers.of(batch)
        new = self._numbers.since(len(self._hashes))
        self._hashes = np.concatenate([self._hashes, hash_keys(new)])
        digest = step_digest(replace(batch, key=key), self._hashes)
        entry = StepEntry(batch.step, batch.iteration, batch.mark, len(batch), digest)
        new_keys = self._key_table.encode(new) if new else b""
        encoded = segments.encode(batch, key)
        num_bytes = len(new_keys) + len(encoded.body) + index.RECORD.itemsize
        num_bytes += len(encoded.head) + len(_END_OF_STREAM)
        if self._max_bytes is not None and self.bytes_written + num_bytes > self._max_bytes:
            self._stop(
                f"max_bytes ({self._max_bytes}) reached: recording stopped before step {batch.step}"
            )
            return
        self._append(entry, new_keys, encoded)

    def _append(self, entry: StepEntry, new_keys: bytes, encoded: segments.EncodedBatch) -> None:
        # In this order: what a file refers to is there before the reference.
        self._keys.append(new_keys)
        segment = self._segment(encoded.head)
        offset = segment.file.size
        segment.file.append(encoded.body)
        record = index.StepRecord(
            entry=entry,
            segment=segment.number,
            offset=offset,
            length=len(encoded.body),
            head_bytes=len(encoded.head),
            head_crc=segment.head_crc,
            batch_crc=crc32(encoded.body),
            num_keys=len(self._hashes),
            keys_bytes=self._keys.size,
            keys_crc=self._keys.crc,
        )
        row = index.record_bytes(record, self._index_crc)
        self._index.append(row)
        self._index_crc = index.chain_crc_of(row)
        self._num_steps += 1
        self.bytes_written += len(new_keys) + len(encoded.body) + index.RECORD.itemsize
        if segment.file.size >= SEGMENT_BYTES:
            self._finish_segment(self._segments.pop(encoded.head))

    def _segment(self, head: bytes) -> _Segment:
        segment = self._segments.get(head)
        if segment is None:
            path = self.directory / segments.segment_name(self._num_segments)
            segment = _Segment(self._num_segments, AppendFile(path), crc32(head))
            segment.file.append(head)
            self.bytes_written += len(head) + len(_END_OF_STREAM)
            self._num_segments += 1
            self._segments[head] = segment
        return segment

    def _finish_segment(self, segment: _Segment) -> None:
        with suppress(OSError):  # only other tools miss the end of a stream
            segment.file.append(_END_OF_STREAM)
        segment.file.close()

    def write_tensors(self, name: str, tensors: Mapping[str, np.ndarray]) -> None:
        """Write a dump, `tensors/<name>.safetensors`. Counts towards max_bytes."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            if self._stopped is not None or self._closed:
                return
            if self._max_bytes is not None and self.bytes_written + num_bytes > self._max_bytes:
                self._stop(f"max_bytes ({self._max_bytes}) reached: stopped before dump {name}")
                return
            try:
                self.bytes_written += write_tensors(self.directory, name, tensors)
            except OSError as error:
                self._stop(f"{_trouble(error)}: recording stopped before dump {name}")

    def note(self, sentence: str) -> None:
        """Keep a sentence about what capture could not see."""
        with self._lock:
            if self._closed:
                return
            line = note_bytes(sentence)
            try:
                self._notes.append(line)
            except OSError as error:
                self._stop(f"{_trouble(error)}: a note was lost")
                return
            self._num_notes += 1
            self.bytes_written += len(line)

    def close(self, reason: str = "") -> None:
        """End the trace. reason: why it is incomplete, or "" if the run was recorded to its end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for segment in self._segments.values():
                self._finish_segment(segment)
            self._write_end(self._stopped or reason)
            self._files.close()

    def _stop(self, reason: str) -> None:
        if self._stopped is None:
            self._stopped = reason
            self._write_end(reason)

    def _write_end(self, reason: str) -> None:
        end = EndRecord(
            complete=not reason,
            reason=reason,
            num_steps=self._num_steps,
            index_crc=self._index_crc,
            num_notes=self._num_notes,
            notes_crc=self._notes.crc,
        )
        with suppress(OSError):  # then the file goes on saying "still running or killed"
            self._end.write(end)


def _cannot_begin(error: OSError, directory: Path) -> RunDirectoryError:
    if isinstance(error, FileExistsError):
        return RunDirectoryError(
            f"cannot record in {directory}: it holds a trace already",
            remedy="name another output directory, or set overwrite",
        )
    return RunDirectoryError(
        f"cannot record in {directory}: {error.strerror}",
        remedy="name another output directory, or free some space",
    )


def _trouble(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "disk full"
    return f"cannot write ({error.strerror})"
