"""From finished batches to the trace, on a thread of its own: training does not wait for a disk.

In:  batches, in order, from the recorder.
Out: what the rank's writer has written. Who looks at batches (the online check, the first size) is
     called on this thread, after a batch is written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import numpy as np

from upguard_plugin.trace.batch import EventBatch

_WAITING = 4  # batches; training waits when a disk is slower than that


class Writer(Protocol):
    """What is needed of `trace.writer.RankWriter`."""

    @property
    def stopped(self) -> str | None: ...
    def write(self, batch: EventBatch) -> None: ...
    def write_tensors(self, name: str, tensors: Mapping[str, np.ndarray]) -> None: ...
    def note(self, sentence: str) -> None: ...
    def close(self, reason: str = "") -> None: ...


class Owner(Protocol):
    """The recorder, as far as its thread knows it."""

    @property
    def failure(self) -> str: ...
    def fail(self, reason: str) -> None: ...
    def note(self, sentence: str) -> None: ...


class WritingThread:
    """Writes batches until it is closed."""

    def __init__(self, writer: Writer, owner: Owner) -> None:
        self.on_first_step: Callable[[], None] | None = None  # called when it is written
        self.on_batch: Callable[[EventBatch], None] | None = None  # called when one is written
        self.on_end: Callable[[], None] | None = None  # ... and when all are
        self._writer = writer
        self._owner = owner
        self._batches: queue.Queue[EventBatch | None] = queue.Queue(maxsize=_WAITING)
        self._thread = threading.Thread(target=self._drain, name="upguard-writer", daemon=True)
        self._thread.start()

    def send(self, batches: Iterable[EventBatch]) -> None:
        """Have these written, in order; nothing once recording has failed."""
        for batch in batches:
            if not self._owner.failure:
                self._batches.put(batch)

    def close(self) -> None:
        """Wait until all is written, and end the trace."""
        self._batches.put(None)
        self._thread.join()
        self._look(self.on_end)
        self._writer.close(self._owner.failure)

    def _drain(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._writer.write(batch)
            except Exception as error:  # between us and the training job: it must go on
                self._owner.fail(f"the trace could not be written: {error}")
            if self._writer.stopped:
                self._owner.fail(self._writer.stopped)
            elif self.on_first_step is not None:
                self.on_first_step()
                self.on_first_step = None
            if self.on_batch is not None:
                self._look(partial(self.on_batch, batch))

    def _look(self, look: Callable[[], None] | None) -> None:
        if look is None or self._owner.failure:
            return
        try:
            look()
        except Exception as error:  # between us and the training job: only the looking ends
            self.on_batch = self.on_end = None
            self._owner.note(f"the online check ended: {type(error).__name__}: {error}")
