"""Watches every operator that the dispatcher shows: forward, backward, optimizer.

In:  operators, below autograd, as a `TorchDispatchMode` sees them.
Out: for each, its inputs and its outputs as events of the module (or parameter) it works for.

A tensor that nobody wrote since it was last hashed is not hashed again: the recorder knows from
`storages.py`, which this probe keeps up to date. What newcomers get wrong: the operators of our own
hashing run through this mode too. The recorder says when it is at work, and the mode looks away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from upguard_plugin.capture.operators.places import NodePlaces, Place, accumulated_parameter
from upguard_plugin.capture.operators.schema import Operator, describe
from upguard_plugin.capture.operators.source import SourceFinder
from upguard_plugin.capture.operators.storages import Storages
from upguard_plugin.records import Source

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


@dataclass(frozen=True, slots=True)
class Running:
    """An operator between its inputs and its outputs."""

    operator: Operator
    boundary: str
    phase: str
    microbatch: int
    call: int
    source: Source | None


class OperatorProbe(TorchDispatchMode):
    """One mode for the whole run; it looks away outside the selected steps and modules."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would fall back to eager under this mode: another program.
        return True

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard
        self._recorder = guard.recorder
        self._position = guard.position
        self._nodes = NodePlaces()
        self._sources = SourceFinder()

    def attach(self) -> None:
        self._recorder.storages = Storages()
        self.__enter__()

    def detach(self) -> None:
        self._recorder.storages = None
        self._nodes.clear()
        leave_mode(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if not recorder.active or recorder.at_work:
            return func(*args, **kwargs)
        running = self._begin(func, args, kwargs)
        result = func(*args, **kwargs)  # what it raises is the user's
        if running is not None:
            self._finish(running, args, kwargs, result)
        return result

    @shielded
    def _begin(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Running | None:
        """Record the inputs. None: the operator is no event."""
        if not isinstance(func, torch._ops.OpOverload):
            return None  # a higher-order operator: what it runs comes by itself
        operator = describe(func)
        tensors = list(_tensors_in(args, kwargs))
        if any(is_traceable_wrapper_subclass(tensor) for _, _, tensor in tensors):
            return None  # the operators on the tensors inside come by themselves
        if operator.is_collective:
            for _, _, tensor in tensors:
                self._storages.lose_sight(tensor)
            return None
        place, phase = self._place(tensors)
        if operator.is_view or not operator.is_observed:
            return None
        if place.boundary and not self._guard.config.selected_module(place.boundary):
            self._note_unrecorded_writes(operator, tensors)
            return None
        running = Running(
            operator,
            place.boundary or OUTSIDE,
            phase,
            place.microbatch,
            self._position.next_call(f"{place.boundary} {operator.name} {phase}"),
            place.source,
        )
        if operator.is_random:
            self._record_generator(running, args, kwargs)
        for slot, position, tensor in tensors:
            if self._storages.of(tensor).initialised:
                moment = "before" if position in operator.written else None
                self._record(running, tensor, "input", slot, moment)
        return running

    @shielded
    def _finish(
        self, running: Running, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record what the operator wrote, then what it returned."""
        operator, storages = running.operator, self._storages
        arguments = list(_tensors_in(args, kwargs))
        for slot, position, tensor in arguments:
            if position in operator.written:
                entry = storages.written(tensor)
                entry.writer = self._record(running, tensor, "output", slot, "after")
        written = {id(tensor) for _, position, tensor in arguments if position in operator.written}
        read = {storages.of(tensor).address for _, position, tensor in arguments}
        for slot, _, tensor in _tensors_in((result,), {}, "out"):
            entry = storages.of(tensor)
            if operator.makes_uninitialised:
                entry.initialised = False
            elif id(tensor) not in written and entry.address not in read:
                entry = storages.written(tensor, in_place=False)
                entry.writer = self._record(running, tensor, "output", slot, None)
