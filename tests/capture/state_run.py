"""A run that records into memory, and the first place where two such runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.placements import Placements
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import Layout
from upguard_plugin.trace.batch import EventBatch


class MemoryWriter:
    """What `RankWriter` does, without a disk."""

    stopped = None

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.notes: list[str] = []
        self.reason = ""

    def write(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def close(self, reason: str = "") -> None:
        self.reason = reason


@dataclass(frozen=True)
class Seen:
    """One event, flat."""

    step: int
    microbatch: int
    phase: str
    role: str
    boundary: str
    slot: str
    call: int
    moment: str | None
    operator: str | None
    dtype: str
    shape: tuple[int, ...]
    h: int
    s: int

    @property
    def place(self):
        return replace(self, dtype="", shape=(), h=0, s=0)


class MemoryRun(list):
    """The events of a run in program order, filled when the guard closes."""

    writer: MemoryWriter

    def where(self, **wanted) -> list[Seen]:
        return [e for e in self if all(getattr(e, k) == v for k, v in wanted.items())]


@contextmanager
def recording(models, optimizers=(), placements=None, layout=None) -> Iterator[tuple]:
    """(guard, run): the run has its events when the context ends."""
    named = models if isinstance(models, tuple) else (("", models),)
    writer = MemoryWriter()
    given = tuple(optimizers) if isinstance(optimizers, (list, tuple)) else (optimizers,)
    guard = Guard(
        UpGuardConfig(), Recorder(writer, FingerprintQueue()), named, given,
        ParameterNames(named), Placements(placements, layout or Layout()),
    )  # fmt: skip
    run = MemoryRun()
    run.writer = writer
    guard.attach()
    try:
        yield guard, run
    finally:
        guard.close()
    assert writer.reason == "", writer.reason
    run.extend(seen for batch in writer.batches for seen in _events(batch))


def _events(batch: EventBatch) -> Iterator[Seen]:
    for row in range(len(batch)):
        key = batch.key_of(row)
        yield Seen(
            batch.step, int(batch.microbatch[row]), key.phase, key.role, key.boundary, key.slot,
            int(batch.call[row]), key.moment, key.operator, key.dtype, key.shape,
            int(batch.h[row]), int(batch.s[row]),
        )  # fmt: skip


def first_difference(baseline: MemoryRun, target: MemoryRun) -> Seen | None:
    """The first event of the target that the baseline does not have at that place, or the other
    way round; None where both are equal. Order is the program order of each."""
    theirs = {e.place: e for e in target}
    assert len(theirs) == len(target), "two events at one place"
    ours = {e.place: e for e in baseline}
    for event in baseline:
        if theirs.get(event.place) != event:
            return theirs.get(event.place, event)
    return next((e for e in target if e.place not in ours), None)
