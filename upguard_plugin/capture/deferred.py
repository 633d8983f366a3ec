"""Rows whose tensor becomes valid later: buffers of collectives that are still under way.

In:  `reserve` when the event gets its place in program order, `fill` when its tensor is there, from
     any thread.
Out: `EventBatch`es without gaps, in step order.

The place of such an event is where its collective was launched, which is the same in every run of a
program; when the collective ends is not. A work that ends after its step keeps the step's batch
back, for `MAX_HELD` steps at most; a row that is never filled is left out, and that is said.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import Placement
from upguard_plugin.trace.batch import NONE, EventBatch

MAX_HELD = 2  # finished steps that wait for a late work; more would grow with the run


@dataclass(slots=True, eq=False)
class Ticket:
    """The right to fill one row, once."""

    row: int
    boundary: str
    placement: Placement | None
    peer: int = NONE  # of a message whose sender is known only when it is there
    pair_seq: int = NONE
    slot: int | None = None  # of the tensor in the queue of late tensors
    step: _Step | None = None  # set when the step of the row is over


@dataclass(slots=True, eq=False)
class _Step:
    batch: EventBatch
    open: set[Ticket]  # not filled yet
    lost: set[Ticket]  # will never be filled


class DeferredRows:
    """The tickets of one recorder."""

    def __init__(self, queue: FingerprintQueue, note: Callable[[str], None]) -> None:
        self._queue = queue
        self._note = note
        self._lock = threading.Lock()
        self._current: set[Ticket] = set()  # reserved in the step that runs
        self._cancelled: set[Ticket] = set()
        self._filled: list[Ticket] = []  # since the queue was taken last
        self._held: deque[_Step] = deque()
        self._streams: list[torch.cuda.Event] = []

    def reserve(self, row: int, boundary: str, placement: Placement | None) -> Ticket:
        """Promise a tensor for a row of the step that runs."""
        ticket = Ticket(row, boundary, placement)
        with self._lock:
            self._current.add(ticket)
        return ticket

    def fill(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Take the fingerprint of `tensor` now, on its current stream, for the ticket's row."""
        with self._lock:
            ticket.slot = self._queue.put(
                tensor, ticket.placement, sketch=self._queue.sketch_size > 0
            )
            self._filled.append(ticket)
            if tensor.is_cuda:
                self._follow(tensor)

    def cancel(self, ticket: Ticket) -> None:
        """Say that the ticket's row will never be filled."""
        with self._lock:
            if ticket.step is None:
                self._cancelled.add(ticket)
            else:
                ticket.step.open.discard(ticket)
                ticket.step.lost.add(ticket)

    def close_step(self, batch: EventBatch | None) -> list[EventBatch]:
        """The batches that are complete now that a step is over, oldest first.

        batch: the step's own, or None if it is not recorded.
        """
        with self._lock:
            tickets, self._current = self._current, set()
            cancelled, self._cancelled = self._cancelled, set()
            if batch is not None:
                step = _Step(batch, tickets, cancelled)
                step.open -= cancelled
                for ticket in tickets:
                    ticket.step = step
                self._held.append(step)
            self._take_filled()
            return self._release(MAX_HELD)

    def close(self) -> list[EventBatch]:
        """All batches that are left, without the rows that were not filled."""
        with self._lock:
            self._take_filled()
            return self._release(0)

    def _take_filled(self) -> None:
        for event in self._streams:
            torch.cuda.current_stream().wait_event(event)
        self._streams.clear()
        hashes = self._queue.take()
        filled, self._filled = self._filled, []
        for ticket in filled:
            step = ticket.step
            if step is None or ticket not in step.open:  # a step that is not recorded, or gone
                continue
            step.open.discard(ticket)
            for name in ("h", "s", "nonfinite", "max_abs", "sketch"):
                column, late = getattr(step.batch, name), getattr(hashes, name)
                if column is not None and late is not None:
                    column[ticket.row] = late[ticket.slot]
            if ticket.peer != NONE:
                step.batch = _with_message(step.batch, ticket)

    def _release(self, max_held: int) -> list[EventBatch]:
        ready: list[EventBatch] = []
        while self._held and (not self._held[0].open or len(self._held) > max_held):
            step = self._held.popleft()
            missing = step.open | step.lost
            step.open.clear()
            if missing:
                names = ", ".join(sorted({ticket.boundary for ticket in missing}))
                self._note(
                    f"step {step.batch.step}: {len(missing)} buffers are not in the trace, "
                    f"because their work was not seen to end: {names}"
                )
            ready.append(_without(step.batch, {ticket.row for ticket in missing}))
        return ready

    def _follow(self, tensor: torch.Tensor) -> None:
        """Let the device-to-host copy wait for this stream, and the allocator too."""
        stream = torch.cuda.current_stream(tensor.device)
        tensor.record_stream(stream)
        event = torch.cuda.Event()
        event.record(stream)
        self._streams.append(event)


def _with_message(batch: EventBatch, ticket: Ticket) -> EventBatch:
    columns: dict[str, Any] = {}
    for name, dtype in (("peer", np.int32), ("pair_seq", np.int64)):
        column = getattr(batch, name)
        columns[name] = np.full(len(batch), NONE, dtype) if column is None else column
        columns[name][ticket.row] = getattr(ticket, name)
    return replace(batch, **columns)


def _without(batch: EventBatch, rows: set[int]) -> EventBatch:
    if not rows:
        return batch
    kept = np.ones(len(batch), bool)
    kept[sorted(rows)] = False
    columns: dict[str, Any] = {
        field.name: value[kept]
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), np.ndarray)
    }
    return replace(batch, **columns)
