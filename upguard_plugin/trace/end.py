"""How a rank's trace ends: `end.json` and `notes.txt`.

`end.json` has a fixed size and is written when recording begins, saying that it still runs. The
last word goes over it in place, so that it needs no space on a disk that has just become full.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from upguard_plugin.trace.batch import RankEnd
from upguard_plugin.trace.files import damaged, from_json, read_whole, to_json

NAME = "end.json"
NOTES_NAME = "notes.txt"
NUM_BYTES = 4096  # one page: written in one piece, and room for any reason
STILL_RUNNING = "still running or killed"
_LONGEST_REASON = 500  # characters, each up to 12 bytes of JSON


@dataclass(frozen=True, slots=True)
class EndRecord:
    """What the writer says last. By its counts and checksums a shortened file is noticed."""

    complete: bool
    reason: str = ""
    num_steps: int | None = None  # None: still running or killed
    index_crc: int | None = None
    num_notes: int | None = None
    notes_crc: int | None = None


class EndFile:
    """The writing side of `end.json`."""

    def __init__(self, path: Path) -> None:
        # Not O_APPEND: with it, Linux appends whatever offset pwrite is given.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, end: EndRecord) -> None:
        fields = {name: getattr(end, name) for name in EndRecord.__slots__}
        fields["reason"] = end.reason[:_LONGEST_REASON]
        os.pwrite(self._descriptor, to_json(fields, size=NUM_BYTES), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def read_end(directory: Path) -> EndRecord:
    """The end record of a rank. Raises TraceError if it is missing or damaged."""
    path = directory / NAME
    fields = from_json(read_whole(path, limit=1 << 16), path)
    try:
        end = EndRecord(**fields)
    except TypeError:
        raise damaged(path, "a field is missing or unknown") from None
    if type(end.complete) is not bool or not isinstance(end.reason, str):
        raise damaged(path, "a field has a wrong type")
    return end


def note_bytes(sentence: str) -> bytes:
    """One line of `notes.txt`: checksum of the JSON string, then the string."""
    text = json.dumps(sentence).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_notes(directory: Path, end: EndRecord) -> tuple[str, ...]:
    """All whole lines of `notes.txt`; a last line that was being written does not count."""
    path = directory / NOTES_NAME
    data = read_whole(path)
    data = data[: data.rfind(b"\n") + 1]
    if end.num_notes is not None and zlib.crc32(data) != end.notes_crc:
        raise damaged(path, "its checksum is wrong: it was damaged or shortened")
    notes: list[str] = []
    for line in data.splitlines():
        crc, _, text = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            raise damaged(path, f"line {len(notes) + 1} is damaged")
        try:
            notes.append(str(json.loads(text)))
        except (ValueError, RecursionError):
            raise damaged(path, f"line {len(notes) + 1} is damaged") from None
    return tuple(notes)


def rank_end(directory: Path) -> RankEnd:
    """`RankEnd` of a rank, from both files."""
    end = read_end(directory)
    return RankEnd(end.complete, end.reason, read_notes(directory, end))
