"""Runs in memory, written down as text, one event a line:

    start     -  param   fc.weight/value        w0
    forward   0  input   fc/args.0              x
    forward   0  output  fc/out                 y       Linear
    forward   0  output  fc/out#1               y2      Linear   bfloat16 [4,8]
    grad_sync -  output  bucket0/out            g       group=0,1:3  op=all_reduce_sum

Columns: phase, micro-batch, role, boundary/slot#call, value (equal text: equal fingerprint), then
in any order an operator or class, dtype, shape, `group=RANKS:SEQ`, `op=`, `moment=`,
`pair=PEER:SEQ`, `by=ROW` (the row that wrote the storage last), `at=SPEC` (placement), `dtype=`,
`holds=NAME` (a flat buffer that is all that tensor's).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from upguard_plugin.records import EventKey, Group, Layout, Placement, Stretch
from upguard_plugin.trace.batch import NONE, EventBatch, RankEnd, StepEntry
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.writer import RankWriter

DTYPES = ("float32", "bfloat16", "float64", "int64", "int32", "uint8", "bool")


def hash_of(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True)
class Event:
    key: EventKey
    microbatch: int
    call: int
    value: object
    group_seq: int = NONE
    peer: int = NONE
    pair_seq: int = NONE
    writer: int = NONE


def event(line: str) -> Event:
    phase, microbatch, role, place, value, *rest = line.split()
    place, _, call = place.partition("#")
    boundary, _, slot = place.partition("/")
    columns = {
        "boundary": boundary, "phase": phase, "role": role, "slot": slot,
        "dtype": "float32", "shape": (4, 8),
    }  # fmt: skip
    numbers = {}
    for word in rest:
        name, _, text = word.partition("=")
        if word in DTYPES:
            columns["dtype"] = word
        elif word.startswith("["):
            columns["shape"] = tuple(int(n) for n in word[1:-1].split(",") if n)
        elif name == "group":
            ranks, _, seq = text.partition(":")
            members = tuple(int(n) for n in ranks.split(","))
            columns["group"] = Group("dp", members)
            numbers["group_seq"] = int(seq)
        elif name == "pair":
            peer, _, seq = text.partition(":")
            numbers |= {"peer": int(peer), "pair_seq": int(seq)}
        elif name == "by":
            numbers["writer"] = int(text)
        elif name == "dtype":
            columns["dtype"] = text
        elif name == "at":
            columns["placement"] = Placement(text, columns["shape"], ())
        elif name == "holds":
            columns["holds"] = (Stretch(0, 32, text),)
        elif name in ("op", "moment"):
            columns[name] = text.replace("_sum", " sum").replace("_avg", " avg")
        else:
            columns["operator"] = word
    row = NONE if microbatch == "-" else int(microbatch)
    return Event(EventKey(**columns), row, int(call or 0), value, **numbers)


def events(text: str) -> list[Event]:
    return [event(line) for line in text.splitlines() if line.strip()]


def batch(step: int, listed: list[Event], iteration: int | None = None) -> EventBatch:
    keys = list(dict.fromkeys(e.key for e in listed))
    number = {key: i for i, key in enumerate(keys)}
    first = step * 100_000

    def ints(values, dtype=np.int64):
        return np.array(list(values), dtype=dtype)

    talks = any(e.group_seq >= 0 or e.pair_seq >= 0 for e in listed)
    return EventBatch(
        step=step,
        keys=keys,
        key=ints((number[e.key] for e in listed), np.int32),
        seq=first + np.arange(len(listed)),
        microbatch=ints((e.microbatch for e in listed), np.int32),
        call=ints((e.call for e in listed), np.int32),
        h=ints((hash_of(e.value) for e in listed), np.uint64),
        s=np.zeros(len(listed), np.uint64),
        iteration=iteration,
        producer=ints(first + e.writer if e.writer >= 0 else NONE for e in listed),
        group_seq=ints(e.group_seq for e in listed) if talks else None,
        peer=ints((e.peer for e in listed), np.int32) if talks else None,
        pair_seq=ints(e.pair_seq for e in listed) if talks else None,
    )


@dataclass(frozen=True)
class MemoryManifest:
    run_id: str = "run"
    program_digest: str = "d0"
    program: str = ""
    world_size: int = 1
    level: str = "module"
    config: dict = field(default_factory=dict)
    versions: dict = field(default_factory=lambda: {"torch": "2.13.0"})
    variables: dict = field(default_factory=dict)
    command: tuple = ()
    fingerprint_version: int = 1
    notes: tuple = ()

    def missing_ranks(self, found) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in found)


class MemoryRun:
    """A run whose batches are in memory. `batches[rank]` is a list, one batch a step."""

    def __init__(self, batches, name="run", ends=None, layouts=None, missing=(), **manifest):
        self.path = Path("runs") / name
        self.batches = {rank: {b.step: b for b in listed} for rank, listed in batches.items()}
        self.ranks = tuple(sorted(batches))
        self.listed_ranks = self.ranks
        self.missing_ranks = tuple(missing)
        self.attempts = ()
        manifest.setdefault("world_size", len(batches) + len(missing))
        manifest.setdefault("program", name)
        self.manifest = MemoryManifest(run_id=name, **manifest)
        self._ends = ends or {}
        self._layouts = layouts or {}
        self.num_reads = 0

    def has_trace(self, rank):
        return rank in self.batches

    def layout(self, rank):
        return self._layouts.get(rank, Layout())

    def steps(self, rank):
        return tuple(
            StepEntry(b.step, b.iteration, b.mark, len(b), _digest(b))
            for b in self.batches[rank].values()
        )

    def read(self, rank, step, *, verify=False):
        self.num_reads += 1
        return self.batches[rank][step]

    def end(self, rank):
        return self._ends.get(rank, RankEnd(True))

    def has_tensors(self, rank, name):
        return False


def _digest(b: EventBatch) -> bytes:
    """Covers what DESIGN says that a step digest covers."""
    rows = [
        (k.boundary, k.role, k.slot, int(call), k.moment, k.dtype, k.shape, int(h), int(s))
        for k, call, h, s in zip((b.keys[i] for i in b.key), b.call, b.h, b.s, strict=True)
    ]
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).digest()


def run(*steps: str, name: str = "run", **settings) -> MemoryRun:
    """A run of one rank; each argument is the text of a step."""
    return MemoryRun(
        {0: [batch(i, events(text)) for i, text in enumerate(steps)]}, name, **settings
    )


def written(run: MemoryRun, directory: Path) -> Path:
    """The same run on disk."""
    directory = claim_run_directory(directory, rank=min(run.ranks), run_token="test")
    fields = asdict(run.manifest) | {"run_id": run_id_of(directory)}
    write_manifest(directory, Manifest(**fields))
    for rank in run.ranks:
        writer = RankWriter(directory, rank, layout=run.layout(rank))
        for made in run.batches[rank].values():
            writer.write(made)
        for note in run.end(rank).notes:
            writer.note(note)
        writer.close(run.end(rank).reason)
    return directory


def edited(text: str, *changes: tuple[str, str]) -> str:
    """The text with each `old` replaced; `old` must occur exactly once."""
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


__all__ = ["Event", "MemoryRun", "batch", "edited", "event", "events", "replace", "run", "written"]
