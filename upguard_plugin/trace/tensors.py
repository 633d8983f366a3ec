"""`tensors/*.safetensors`: full dumps of tensors, where they were asked for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

import numpy as np
import safetensors
import safetensors.numpy

from upguard_plugin.trace.files import damaged, is_real_directory, read_whole, replace_file

DIRECTORY = "tensors"
SUFFIX = ".safetensors"
_LONGEST_NAME = 200  # file systems allow 255 bytes, with a suffix and that of a draft


def file_name(name: str) -> str:
    """The file for a dump called `name`: what is unsafe in a file name is percent-encoded."""
    quoted = quote(name, safe="")
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"  # a hidden file otherwise
    if len(quoted) > _LONGEST_NAME:
        quoted = f"{quoted[:_LONGEST_NAME]}-{blake2b(name.encode(), digest_size=8).hexdigest()}"
    return quoted + SUFFIX


def write_tensors(directory: Path, name: str, tensors: Mapping[str, np.ndarray]) -> int:
    """Write one dump into a rank's directory; returns its size in bytes. Raises OSError."""
    # Not ascontiguousarray, which gives an array without dims one of size 1.
    plain = {key: np.asarray(tensor, order="C") for key, tensor in tensors.items()}
    data = safetensors.numpy.save(plain, metadata={"crc32": str(_checksum(plain))})
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    replace_file(folder / file_name(name), data)
    return len(data)


def has_tensors(directory: Path, name: str) -> bool:
    """Whether there is such a dump; it may be damaged."""
    return (directory / DIRECTORY / file_name(name)).exists()


def read_tensors(directory: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of one dump. Raises TraceError if it is missing or damaged."""
    folder = directory / DIRECTORY
    path = folder / file_name(name)
    if not is_real_directory(folder):
        raise damaged(path, "the run has no dumps of this rank", "record with dump switched on")
    data = read_whole(path, limit=1 << 40)
    try:
        tensors = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        expected = header["__metadata__"]["crc32"]
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise damaged(path, f"it is no dump of UpGuard ({str(error)[:120]})") from None
    if expected != str(_checksum(tensors)):
        raise damaged(path, "its checksum is wrong: it was damaged")
    return dict(tensors)


def _checksum(tensors: Mapping[str, np.ndarray]) -> int:
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name}{tensor.dtype.str}{tensor.shape}".encode(), crc)
        crc = zlib.crc32(tensor.tobytes(), crc)
    return crc
