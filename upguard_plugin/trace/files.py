"""Files of a run directory, read and written with care.

In:  a directory and the bare name of a file in it.
Out: bytes, or a `TraceError` that names the file and says what to do.

Everything under a run directory is somebody else's data. Names never come from inside a file, links
are not followed, and only regular files are opened, so that no trace leads out of its directory.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upguard_plugin.errors import TraceError

_CHECKSUM = b',\n "checksum": '
COPY_AGAIN = "copy the run again from where it was recorded, or record it again"


def damaged(path: Path, what: str, remedy: str = COPY_AGAIN) -> TraceError:
    """The error for a file that does not hold what the writer put there."""
    return TraceError(f"cannot read {path}: {what}", remedy=remedy)


def open_regular(path: Path) -> int:
    """A file descriptor for reading. Raises TraceError for anything but a readable regular file."""
    # O_NONBLOCK: opening a named pipe must fail below, not wait for somebody to write to it.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise damaged(path, "the file is missing") from None
    except PermissionError:
        raise damaged(
            path, "permission denied", "make it readable (chmod u+r), or read it as its owner"
        ) from None
    except OSError as error:
        if path.is_symlink():
            raise damaged(path, "it is a symbolic link, and links are not followed") from None
        raise damaged(path, os.strerror(error.errno or 0)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged(path, "it is not a regular file")
    return descriptor


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Exactly `length` bytes from `offset` on. Raises TraceError if the file is shorter."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if offset + length > size:
            raise damaged(
                path, f"it is truncated: {size} bytes, but {offset + length} were written"
            )
        return _pread(descriptor, offset, length, path)
    finally:
        os.close(descriptor)


def read_whole(path: Path, limit: int = 1 << 31) -> bytes:
    """All bytes of a file of at most `limit` bytes."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise damaged(path, f"{size} bytes are more than UpGuard ever writes there")
        return _pread(descriptor, 0, size, path)
    finally:
        os.close(descriptor)


def _pread(descriptor: int, offset: int, length: int, path: Path) -> bytes:
    # Not memory-mapped: a file that shrinks while it is read must give an error, not a SIGBUS.
    parts: list[bytes] = []
    while length:
        try:
            part = os.pread(descriptor, min(length, 1 << 30), offset)
        except OSError as error:
            raise damaged(path, os.strerror(error.errno or 0)) from None
        if not part:
            raise damaged(path, "it shrank while it was read")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class AppendFile:
    """A new file that only grows. What `append` has returned from, a killed process does not lose.

    Raises OSError as the file system gives it; a failed `append` leaves the file as it was before.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self.size = 0
        self.crc = 0  # CRC-32 of the whole file

    def append(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def close(self) -> None:
        os.close(self._descriptor)


def is_real_directory(path: Path) -> bool:
    """Whether `path` is a directory and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def to_json(fields: Mapping[str, Any], *, size: int = 0) -> bytes:
    """A JSON object whose last field is a checksum of all bytes before it.

    size: in bytes, to which the text is padded with spaces.
    """
    body = json.dumps(fields, indent=1, ensure_ascii=True, sort_keys=True)[:-1].rstrip().encode()
    text = body + _CHECKSUM + b"%d\n}" % zlib.crc32(body)
    return text.ljust(size - 1) + b"\n"


def from_json(data: bytes, path: Path) -> dict[str, Any]:
    """The fields of `to_json`. Raises TraceError if the text is no such object or was changed."""
    body, separator, _ = data.rpartition(_CHECKSUM)
    try:
        fields = json.loads(data)
        checksum = fields.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise damaged(path, "it is not a file of UpGuard, or it is damaged") from None
    if not separator or checksum != zlib.crc32(body):
        raise damaged(path, "its checksum is wrong: it was damaged or edited")
    return dict(fields)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees either all of it or what was there before."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)
