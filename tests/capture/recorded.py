"""Short recorded trainings, and their events read back from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from upguard_plugin.capture.enable import enable
from upguard_plugin.capture.guard import Guard
from upguard_plugin.trace.reader import open_trace


@dataclass(frozen=True)
class Seen:
    """One event, flat."""

    step: int
    microbatch: int
    phase: str
    boundary: str
    role: str
    slot: str
    call: int
    dtype: str
    shape: tuple[int, ...]
    h: int
    seq: int
    producer: int


class Recorded:
    """What a run directory holds of one rank."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        trace = open_trace(run)
        self.manifest = trace.manifest
        self.end = trace.end(rank)
        self.digests = [entry.digest for entry in trace.steps(rank)]
        self.steps = [entry.step for entry in trace.steps(rank)]
        self.events = [e for step in self.steps for e in _events(trace.read(rank, step))]

    def find(self, **fields: Any) -> list[Seen]:
        """The events whose fields have these values, in program order."""
        return [e for e in self.events if all(getattr(e, k) == v for k, v in fields.items())]

    def one(self, **fields: Any) -> Seen:
        """The only event with these fields."""
        (event,) = self.find(**fields)
        return event


def _events(batch: Any) -> Iterator[Seen]:
    for i in range(len(batch)):
        key = batch.key_of(i)
        yield Seen(
            batch.step, int(batch.microbatch[i]), key.phase, key.boundary, key.role, key.slot,
            int(batch.call[i]), key.dtype, key.shape, int(batch.h[i]), int(batch.seq[i]),
            -1 if batch.producer is None else int(batch.producer[i]),
        )  # fmt: skip


@contextmanager
def guarded(run: Path, model: Any, optimizer: Any = None, **settings: Any) -> Iterator[Guard]:
    """A guard on the models, closed at the end."""
    extra = {k: settings.pop(k) for k in ("layout", "placements", "tied") if k in settings}
    with enable(model, optimizer, {"output_dir": str(run), **settings}, **extra) as guard:
        yield guard


def record_steps(
    run: Path, model: nn.Module, step: Callable[[Guard], None], steps: int = 1, **settings: Any
) -> Recorded:
    """Run `step` a few times under a guard; what was recorded."""
    with guarded(run, model, **settings) as guard:
        for _ in range(steps):
            step(guard)
            guard.step()
    return Recorded(run)
