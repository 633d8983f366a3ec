"""A trace that stays in memory: what a probe records, as plain rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import Placement, Stretch
from upguard_plugin.trace.batch import NONE, EventBatch


@dataclass(frozen=True)
class Row:
    """One event with everything that matters of it."""

    step: int
    boundary: str
    phase: str
    role: str
    slot: str
    moment: str | None
    call: int
    op: str | None
    ranks: tuple[int, ...]
    group: str
    group_seq: int
    peer: int
    tag: int
    pair_seq: int
    dtype: str
    shape: tuple[int, ...]
    h: int
    s: int
    placement: Placement | None = field(default=None, repr=False)
    source: str | None = None  # the file's name
    holds: tuple[Stretch, ...] = field(default=(), repr=False)


class MemoryWriter:
    """Keeps batches and notes."""

    stopped: str | None = None

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.notes: list[str] = []
        self.reason: str | None = None

    def write(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def close(self, reason: str = "") -> None:
        self.reason = reason

    def rows(self) -> list[Row]:
        return [_row(batch, i) for batch in self.batches for i in range(len(batch))]


def _row(batch: EventBatch, i: int) -> Row:
    key = batch.key_of(i)

    def number(column: Any) -> int:
        return NONE if column is None else int(column[i])

    return Row(
        step=batch.step,
        boundary=key.boundary,
        phase=key.phase,
        role=key.role,
        slot=key.slot,
        moment=key.moment,
        call=int(batch.call[i]),
        op=key.op,
        ranks=key.group.ranks if key.group else (),
        group=key.group.name if key.group else "",
        group_seq=number(batch.group_seq),
        peer=number(batch.peer),
        tag=number(batch.tag),
        pair_seq=number(batch.pair_seq),
        dtype=key.dtype,
        shape=key.shape,
        h=int(batch.h[i]),
        s=int(batch.s[i]),
        placement=key.placement,
        source=None if key.source is None else key.source.file.rsplit("/", 1)[-1],
        holds=key.holds,
    )


@dataclass
class MemoryTrace:
    """A recorder and its writer; `rows` and `notes` are complete after the `with` block."""

    recorder: Recorder
    writer: MemoryWriter
    probe: CollectiveProbe
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def step(self) -> None:
        self.recorder.finish_step()


@contextmanager
def record_collectives(**options: Any) -> Iterator[MemoryTrace]:
    """Record all collectives of the block; the last step is finished by the block's end."""
    writer = MemoryWriter()
    recorder = Recorder(writer, FingerprintQueue())
    trace = MemoryTrace(recorder, writer, CollectiveProbe(recorder, **options))
    trace.probe.attach()
    try:
        yield trace
        recorder.finish_step()
    finally:
        trace.probe.detach()
        recorder.close()
    trace.rows, trace.notes = writer.rows(), writer.notes
    assert writer.reason == "", writer.reason


def hash_of(tensor: torch.Tensor, placement: Placement | None = None) -> int:
    """The fingerprint of a tensor, at its place in a logical one if that is given."""
    queue = FingerprintQueue()
    queue.put(tensor, placement)
    return int(queue.take().h[0])


def ints(rank: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Whole numbers, others on each rank."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-(1 << 20), 1 << 20, shape, generator=generator).to(dtype)


def store() -> dist.Store:
    """Where ranks tell each other how far they are."""
    return dist.distributed_c10d._get_default_store()


def pick(rows: list[Row], role: str, moment: str) -> list[Row]:
    """The rows of one role and moment, in order."""
    return [row for row in rows if (row.role, row.moment) == (role, moment)]
