"""The step digest: 16 bytes that stand for all events of one rank in one step.

It covers boundary, role, slot, moment, dtype, shape, call and fingerprint of every event in program
order, and nothing else: runs that agree on these agree, whatever their file names, source lines and
groups. docs/trace-format.md gives the definition byte by byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch

DIGEST_BYTES = 16
_ENCODER = json.JSONEncoder(separators=(",", ":"))

KeyHashes = npt.NDArray[np.uint64]  # [keys, 2]


def hash_keys(keys: Sequence[EventKey]) -> KeyHashes:
    """What the step digest takes of each key: uint64 [keys, 2], 16 bytes of BLAKE2b."""
    hashes = b"".join(hashlib.blake2b(_key_bytes(key), digest_size=16).digest() for key in keys)
    return np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)


def _key_bytes(key: EventKey) -> bytes:
    fields = [key.boundary, key.role, key.slot, key.moment, key.dtype, list(key.shape)]
    return _ENCODER.encode(fields).encode("ascii")


def step_digest(batch: EventBatch, key_hashes: KeyHashes | None = None) -> bytes:
    """The 16-byte digest of a batch.

    key_hashes: `hash_keys(batch.keys)` where the caller has it already; the keys repeat every step.
    """
    if key_hashes is None:
        used, place = np.unique(batch.key, return_inverse=True)
        hashes = hash_keys([batch.keys[i] for i in used])[place]
    else:
        hashes = key_hashes[batch.key]
    rows = np.empty((len(batch), 5), dtype="<u8")
    rows[:, :2] = hashes
    rows[:, 2] = batch.call.astype(np.int64).view(np.uint64)
    rows[:, 3] = batch.h
    rows[:, 4] = batch.s
    return hashlib.blake2b(rows.data, digest_size=DIGEST_BYTES).digest()
