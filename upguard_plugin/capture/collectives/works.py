"""When a collective is over: from the Work that torch returns to one call of ours.

In:  Works, each with a function to call once its buffers are final.
Out: that call, before the training program can touch the buffers.

Two ways, because there are two kinds of waiting:

* A Work on the CPU has a future whose callbacks run before `Work.wait` returns and before callbacks
  that were added later. Those who wait for the future itself are woken before its callbacks run:
  Python code gets a future from `get_future` that is behind us, and DDP's reducer, which only reads
  the buckets, is caught up with when backward returns. The callback runs on the backend's thread.
* A Work without a future (send and recv on gloo), or on a GPU and waited for from Python: `wait`,
  `synchronize`, a true `is_completed`, or `wait_tensor` call us when the original has returned, on
  the stream that waited. A Work that the program drops without any of these is counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from upguard_plugin.capture.collectives.under_way import Flight, UnderWay
from upguard_plugin.capture.extents import storage_data_ptr
from upguard_plugin.capture.pauses import inside_kernel
from upguard_plugin.capture.recorder import Recorder

_CATCH_UP_S = 60.0  # for the hashing of buffers that are final already; more is a failure of ours
_OWN_REFERENCES = 2  # to a Work, where its references are counted: a variable and an argument


@dataclass(slots=True, eq=False)
class Pending:
    """A collective that is under way. It keeps its Work and buffers alive until it is over.

    A backend's thread that frees the last reference to a Python tensor needs the GIL, at a moment
    when it holds its queue's lock.
    """

    work: Work
    tensors: Sequence[torch.Tensor]  # all buffers, also those that nobody looks at
    finish: Callable[[Work, bool], None]  # called once; True: the buffers are final, False: never
    functional: bool = False  # torch waits for it by its tensor, not by its Work
    future: Any = None  # where its callback finishes
    flight: Flight | None = None  # whether its outputs may be used


class Works:
    """All Works under way of this process."""

    def __init__(self, recorder: Recorder, under_way: UnderWay) -> None:
        self._recorder = recorder
        self._under_way = under_way
        self.num_dropped = 0  # never waited for, as far as we can see
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)
        self._finishing: set[Pending] = set()
        self._pending: dict[int, list[Pending]] = {}  # by the Work's id; it is kept alive
        self._coalescing: dict[int, list[Pending]] = {}  # by the ProcessGroup's id
        self._originals: list[tuple[Any, str, Any]] = []

    def attach(self) -> None:
        """See every wait that comes from Python."""
        for name in ("wait", "synchronize", "block_current_stream"):
            self._wrap(Work, name, self._wait)
        self._wrap(Work, "is_completed", self._is_completed)
        self._wrap(Work, "get_future", self._get_future)
        self._wrap(Work, "get_future_result", self._get_future_result)
        self._wrap(ProcessGroup, "_start_coalescing", self._start_coalescing)
        self._wrap(ProcessGroup, "_end_coalescing", self._end_coalescing)
        self._wrap(torch.autograd, "_engine_run_backward", self._run_backward)

    def detach(self) -> None:
        """Give torch's classes their own methods back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def add(self, pending: Pending, group: ProcessGroup, *, by_future: bool) -> None:
        """Watch a Work that has just been launched."""
        pending.future = _future_of(pending.work) if by_future else None
        flight = pending.flight
        if flight is not None:
            flight.future = pending.future
            if flight.in_sight or flight.future is not None:
                self._under_way.add(flight)
        with self._lock:
            self._drop_forgotten()
            coalesced = self._coalescing.get(id(group))
            if coalesced is not None and pending.future is None:
                coalesced.append(pending)
                return
            self._pending.setdefault(id(pending.work), []).append(pending)
        if pending.future is not None:
            pending.future.add_done_callback(lambda done: self._end(pending, _succeeded(done)))

    def catch_up(self, work: Work | None = None) -> None:
        """Wait for the callbacks of futures that are done, of one Work or all; never for a Work."""
        with self._finished:
            self._finished.wait_for(lambda: not self._is_behind(work), _CATCH_UP_S)

    def tensor_waited(self, tensor: torch.Tensor) -> None:
        """`wait_tensor` has returned for a buffer of a functional collective."""
        self._under_way.waits_for(tensor)
        if not self._pending:
            return
        address = storage_data_ptr(tensor.untyped_storage())
        with self._lock:
            over = [
                pending
                for many in self._pending.values()
                for pending in many
                if pending.future is None
                and any(storage_data_ptr(t.untyped_storage()) == address for t in pending.tensors)
            ]
        for pending in over:
            self._end(pending, True)

    def abandon(self) -> list[Pending]:
        """Forget all that is under way, and return it."""
        with self._lock:
            left = [p for many in self._pending.values() for p in many]
            left += [p for many in self._coalescing.values() for p in many]
            self._pending.clear()
            self._coalescing.clear()
        return left

    def _is_behind(self, work: Work | None) -> bool:
        if any(work is None or pending.work is work for pending in self._finishing):
            return True
        works = self._pending.values() if work is None else [self._pending.get(id(work), [])]
        return any(
            pending.future is not None and pending.future.done()
            for many in works
            for pending in many
        )

    def _end(self, pending: Pending, final: bool) -> None:
        with self._lock:
            many = self._pending.get(id(pending.work), [])
            if pending not in many:
                return  # a second wait, or a work that was abandoned
            many.remove(pending)
            if not many:
                del self._pending[id(pending.work)]
            self._finishing.add(pending)
        self._under_way.is_over(pending.flight)
        pending.finish(pending.work, final)
        with self._finished:
            self._finishing.discard(pending)
            self._finished.notify_all()

    def _end_all(self, work: Work) -> None:
        for pending in list(self._pending.get(id(work), ())):
            if pending.future is None:
                self._end(pending, True)
        if self._pending or self._finishing:
            self.catch_up(work)

    def _drop_forgotten(self) -> None:
        for key, many in list(self._pending.items()):
            if many[0].future is not None or many[0].functional:
                continue
            work = many[0].work
            held = len(many) + self._under_way.num_references(work)
            if sys.getrefcount(work) <= held + _OWN_REFERENCES:
                del self._pending[key]
                self.num_dropped += len(many)
                for pending in many:
                    pending.finish(pending.work, False)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:  # newer than this torch
            return

        @wraps(original)
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            return around(original, this, *args, **kwargs)

        setattr(owner, name, method)
        self._originals.append((owner, name, original))

    def _wait(self, original: Callable[..., Any], work: Work, *args: Any, **kwargs: Any) -> Any:
        if self._under_way.outputs:
            self._under_way.waits(work)
        with inside_kernel(self._recorder):  # some backends copy their results out now
            result = original(work, *args, **kwargs)
        self._end_all(work)
        return result

    def _is_completed(self, original: Callable[..., Any], work: Work) -> Any:
        completed = original(work)
        if completed:
            self._under_way.waits(work)
            self._end_all(work)
        return completed

    def _get_future(self, original: Callable[..., Any], work: Work) -> Any:
        future = original(work)
        self._under_way.hide(work)
        with self._lock:
            known = [*self._pending.get(id(work), ()), *self._finishing]
            under_way = any(one.work is work and one.future is not None for one in known)
        # Those who wait for a future are woken before its callbacks run; those who wait for the
        # next link are behind us.
        return future.then(partial(self._value_behind_us, work)) if under_way else future

    def _value_behind_us(self, work: Work, future: torch.futures.Future) -> Any:
        self.catch_up(work)  # where the future was over already, its callbacks may still run
        return future.value()

    def _get_future_result(self, original: Callable[..., Any], work: Work) -> Any:
        self._under_way.hide(work)
        return original(work)

    def _run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._pending or self._finishing:
            self.catch_up()
        return result

    def _start_coalescing(self, original: Callable[..., Any], group: Any, *args: Any) -> Any:
        result = original(group, *args)
        with self._lock:
            self._coalescing[id(group)] = []
        return result

    def _end_coalescing(self, original: Callable[..., Any], group: Any, *args: Any) -> Any:
        work = original(group, *args)
        with self._lock:
            coalesced = self._coalescing.pop(id(group), [])
            if work is not None:
                for pending in coalesced:
                    self._under_way.moved(pending.work, work)
                    pending.work = work
                if coalesced:
                    self._pending.setdefault(id(work), []).extend(coalesced)
        if work is None:  # ordered by the stream
            for pending in coalesced:
                pending.finish(pending.work, True)
        return work


def _future_of(work: Work) -> Any:
    try:
        return work.get_future()
    except RuntimeError:  # this backend has none for this kind of work
        return None


def _succeeded(future: Any) -> bool:
    try:
        future.value()
    except Exception:  # whatever the backend failed with; the program gets it from its own wait
        return False
    return True
