"""Outputs that nobody may touch yet: from the launch of a collective to the wait for its work.

In:  launches with the memory that they write; waits and completions; what uses memory meanwhile.
Out: each output that is used too early, once, to a function that records it.

There are two kinds. A work that torch.distributed has handed to the program is waited for in sight:
until then nobody may touch its output, also where the collective happens to be over. The works of
C++, of futures, of functional collectives, and those that torch registers for compiled code, are
waited for out of sight: only while such a collective is surely under way is a use too early. Those
are followed on the CPU alone, because on a GPU a wait orders streams and nobody can ask whether it
has been.

The memory of an output is told by its storage and its bytes in it: a buffer that is cut into many
outputs may be used wherever nothing is under way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import Work
from torch.multiprocessing.reductions import StorageWeakRef

from upguard_plugin.capture.extents import Extent, extent_of, is_tracked, reaches
from upguard_plugin.records import Group, Source

_OWN_REFERENCES = 2  # to a Work, where its references are counted: a variable and an argument


@dataclass(frozen=True, slots=True)
class Origin:
    """Which collective an output is of. It keeps no tensor."""

    boundary: str
    phase: str
    call: int
    group: Group
    source: Source | None


@dataclass(slots=True, eq=False)
class Output:
    """One output of a collective that is under way."""

    origin: Origin
    slot: str
    alive: StorageWeakRef
    extent: Extent
    counted: torch.Tensor | None  # shares its version counter; None where that tells nothing
    version: int = 0  # at the launch
    version_when_over: int | None = None

    def was_written(self) -> bool:
        """Whether somebody else than the collective has written it since the launch."""
        return self.counted is not None and self.counted._version != self.version


def outputs_of(
    origin: Origin, tensors: Iterable[tuple[str, torch.Tensor]], *, counts: bool
) -> list[Output]:
    """The outputs whose memory can be followed.

    tensors: slots, and looks at memory that are kept. counts: whether the backend writes them
    behind the back of their version counters.
    """
    found = []
    for slot, tensor in tensors:
        if not is_tracked(tensor) or not tensor.numel():
            continue
        extent, storage = extent_of(tensor), tensor.untyped_storage()
        if extent[1] - extent[0] + 1 != tensor.nbytes:  # with gaps
            continue
        # All looks at a storage share a counter: it tells of this output if there is nothing else.
        alone = counts and tensor.nbytes == storage.nbytes() and not tensor.is_inference()
        found.append(
            Output(
                origin,
                slot,
                StorageWeakRef(storage),
                extent,
                tensor if alone else None,
                tensor._version if alone else 0,
            )
        )
    return found


@dataclass(slots=True, eq=False)
class Flight:
    """A collective between its launch and the wait for it."""

    work: Work | None  # None: waited for out of sight, or dropped by the program
    outputs: list[Output]
    in_sight: bool  # whether every wait for it is seen
    on_cpu: bool
    future: Any = None
    is_over: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def has_ended(self) -> bool:
        """Whether the collective is over, as far as anybody can tell."""
        # Those who wait for a future are woken before its callbacks run.
        is_done = self.is_over or (self.future is not None and self.future.done())
        return is_done or (self.work is not None and bool(_is_completed(self.work)))


@dataclass(frozen=True, slots=True)
class Use:
    """Something that reads or writes memory: an operator, another collective."""

    operator: str | None  # None: it was not seen, only what it did
    writes: bool
    phase: str
    source: Source | None


Report = Callable[[Output, bool, Use], None]  # with whether the collective was over


class UnderWay:
    """All outputs of this process that are under way."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.RLock()
        self._flights: list[Flight] = []
        # By storage; an entry keeps the storage's address its own. Empty: there is nothing to ask.
        self.outputs: dict[int, list[tuple[Flight, Output]]] = {}

    def add(self, flight: Flight) -> None:
        """Follow a collective that has just been launched."""
        with self._lock:
            self._forget_dropped()
            self._flights.append(flight)
            for output in flight.outputs:
                self._replace_dropped(output)
                self.outputs.setdefault(output.alive.cdata, []).append((flight, output))

    def num_references(self, work: Work) -> int:
        """How many references to a work are kept here."""
        return sum(flight.work is work for flight in self._flights)

    def moved(self, old: Work, new: Work) -> None:
        """The program gets and waits for another work in the place of this one."""
        for flight in self._of(old):
            flight.work = new

    def hide(self, work: Work) -> None:
        """The program has got a future: it may wait for that, which nobody sees."""
        for flight in self._of(work):
            flight.in_sight, flight.work = False, None
            if flight.is_over or flight.future is None:
                self._remove(flight)

    def is_over(self, flight: Flight | None) -> None:
        """The collective has ended; it may not have been waited for. From any thread."""
        if flight is None:
            return
        flight.is_over = True
        for output in flight.outputs:
            if output.counted is not None:
                output.version_when_over = output.counted._version
        if not flight.in_sight:
            self._remove(flight)

    def waits(self, work: Work) -> None:
        """The program waits: from now on it may use the outputs, and torch may still write them.

        What somebody else has written until now was too early.
        """
        for flight in self._of(work):
            for output in flight.outputs:
                if output.was_written():
                    write = Use(None, True, output.origin.phase, output.origin.source)
                    self._report(output, output.version_when_over == output.version, write)
            self._remove(flight)

    def waits_for(self, tensor: torch.Tensor) -> None:
        """The program waits for whatever is under way in a tensor's storage."""
        if self.touches(tensor):
            with self._lock:
                for flight, output in self.outputs.get(tensor.untyped_storage()._cdata, ()):
                    self._take(flight, output)

    def touches(self, tensor: torch.Tensor) -> bool:
        """Whether something is under way in the tensor's storage."""
        return is_tracked(tensor) and tensor.untyped_storage()._cdata in self.outputs

    def use(self, tensor: torch.Tensor, use: Use) -> None:
        """Report what of a tensor's memory is under way, as somebody uses it."""
        if not self.touches(tensor):
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing runs now, and nobody may be asked whether it is over
        with self._lock:
            listed = self.outputs.get(tensor.untyped_storage()._cdata, ())
            hit = [(f, o) for f, o in listed if reaches(tensor, o.extent)]
            for flight, output in hit:
                self._take(flight, output)
        for flight, output in hit:
            has_ended = flight.has_ended()
            if flight.in_sight or not has_ended:
                self._report(output, has_ended, use)

    def reshaped(self, tensor: torch.Tensor) -> None:
        """The tensor lies otherwise in its memory now: that moves its version counter too."""
        if self.touches(tensor):
            with self._lock:
                for _, output in self.outputs.get(tensor.untyped_storage()._cdata, ()):
                    output.counted = None

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._flights.clear()
            self.outputs.clear()

    def _of(self, work: Work) -> list[Flight]:
        with self._lock:
            return [flight for flight in self._flights if flight.work is work]

    def _remove(self, flight: Flight) -> None:
        with self._lock:
            for output in list(flight.outputs):
                self._take(flight, output)
            if flight in self._flights:
                self._flights.remove(flight)

    def _take(self, flight: Flight, output: Output) -> None:
        """Follow an output no more."""
        left = [pair for pair in self.outputs.get(output.alive.cdata, ()) if pair[1] is not output]
        if left:
            self.outputs[output.alive.cdata] = left
        else:
            self.outputs.pop(output.alive.cdata, None)
        flight.outputs.remove(output)

    def _replace_dropped(self, output: Output) -> None:
        """What nobody will ever wait for ends when its memory is an output again."""
        first, last = output.extent
        for flight, other in list(self.outputs.get(output.alive.cdata, ())):
            if flight.work is None and other.extent[0] <= last and first <= other.extent[1]:
                self._take(flight, other)

    def _forget_dropped(self) -> None:
        """Works that the program has dropped are not kept; gone memory is not followed."""
        for flight in list(self._flights):
            if flight.work is not None and self._is_dropped(flight.work, flight.thread):
                flight.work = None
                flight.is_over |= not flight.on_cpu  # nobody can be asked any more
                for output in flight.outputs:
                    output.counted = None
            for output in [o for o in flight.outputs if o.alive.expired()]:
                self._take(flight, output)
            if not flight.outputs:
                self._flights.remove(flight)

    def _is_dropped(self, work: Work, launched_by: int) -> bool:
        # Another thread may be about to hand out what it has launched.
        own = self.num_references(work) + _OWN_REFERENCES
        return launched_by == threading.get_ident() and sys.getrefcount(work) <= own


_is_completed = Work.is_completed  # torch's own: the program's look at it counts as a wait
