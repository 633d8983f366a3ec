"""A rank's recording: what is selected, what the current step holds, how a step and the run end.

In:  settings, and the steps of the training.
Out: one `EventBatch` per step, handed to the rank's writer on a background thread; notes.

How events come in is the `Recorder`'s, which builds on this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from upguard_plugin.capture.deferred import DeferredRows
from upguard_plugin.capture.dumps import Dumps
from upguard_plugin.capture.idle_settings import idle_steps
from upguard_plugin.capture.position import Position
from upguard_plugin.capture.rows import Rows
from upguard_plugin.capture.slots import Slots
from upguard_plugin.capture.storages import Storages
from upguard_plugin.capture.tensors import Numbers
from upguard_plugin.capture.writing import Writer, WritingThread
from upguard_plugin.config import Dump, UpGuardConfig
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import PHASES, ROLES
from upguard_plugin.trace.batch import EventBatch


class Recording:
    """The events of one rank, from the first step to the end of its trace."""

    def __init__(
        self,
        writer: Writer,
        queue_: FingerprintQueue,
        roles: Iterable[str] = (),
        phases: Iterable[str] = (),
        dump: Dump | None = None,
    ) -> None:
        """roles, phases: those to record; none: all. dump: tensors to keep whole."""
        self.position = Position()
        self.active = True  # False outside the selected steps: probes return at once
        self.failure = ""  # why recording ended early
        self.threads_aside: set[int] = set()  # what they do is no part of the training
        self.threads_inside: set[int] = set()  # a kernel, or a wait: its operators are no events
        self._writer = writer
        self._queue = queue_
        self._deferred = DeferredRows(FingerprintQueue(sketch_size=queue_.sketch_size), writer.note)
        self._lock = threading.RLock()
        self._rows = Rows()
        self._slots = Slots(queue_, self._rows.boundary_of, self.note)
        self._dumps = Dumps(dump)
        self._noted: set[str] = set()
        self._num_recorded = 0  # steps
        self._left_out = frozenset(ROLES) - frozenset(roles or ROLES)
        self.phases_left_out = frozenset(PHASES) - frozenset(phases or PHASES)
        self._numbers = Numbers()
        self.writing = WritingThread(writer, self)

    @property
    def storages(self) -> Storages | None:
        """Who wrote which storage; None where writes are not tracked."""
        return self._slots.storages

    @storages.setter
    def storages(self, storages: Storages | None) -> None:
        self._slots.storages = storages

    def wants(self, role: str) -> bool:
        """Whether events of this role are recorded at all."""
        return role not in self._left_out

    def finish_step(self, *, mark: str | None = None) -> None:
        """Close the step: one device-to-host copy, one batch to the writer, on to the next step."""
        with self._lock:
            self._num_recorded += self.active
            tensors = self._dumps.take(recorded=self.active)
            if tensors and self.active:
                self._writer.write_tensors(f"step{self.position.step}", tensors)
            batches = self._deferred.close_step(self._take_batch(mark))
            self.position.next_step()
        self.writing.send(batches)

    def select(self, recorded: bool) -> None:
        """Say whether the step that begins is to be recorded."""
        self.active = recorded and not self.failure
        self._dumps.select(self.position.step)

    def fail(self, reason: str) -> None:
        """Stop recording for good; training goes on and the trace says why it is incomplete."""
        self.failure = self.failure or reason
        self.active = False

    def note(self, sentence: str) -> None:
        """Say in the trace, once, what capture could not see."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._writer.note(sentence)

    def idle(self, config: UpGuardConfig) -> list[str]:
        """What is to be said of settings that named nothing in the steps that are over."""
        steps = list(idle_steps(config, self.position.step, self._num_recorded))
        return steps or list(self._dumps.idle())

    def close(self) -> None:
        """Write what is finished, then end the trace. An unfinished step is not written."""
        self.writing.send(self._deferred.close())
        self.writing.close()

    def _take_batch(self, mark: str | None) -> EventBatch | None:
        hashes = self._queue.take()
        if self.storages is not None:
            self.storages.end_step()  # slots are numbered anew in each step
        batch = self._rows.take(hashes, self.position, mark)
        return batch if self.active else None
