"""Watches every operator that the dispatcher shows: forward, backward, optimizer.

In:  operators, below autograd, as a `TorchDispatchMode` sees them.
Out: for each, its inputs and its outputs as events of the module (or parameter) it works for.

A tensor that nobody wrote since it was last hashed is not hashed again: the recorder knows from
`storages.py`, which this probe keeps up to date. What newcomers get wrong: the operators of our own
hashing run through this mode too. The recorder says when it is at work, and the mode looks away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from upguard_plugin.capture.operators.arguments import Argument, tensors_in, tensors_returned
from upguard_plugin.capture.operators.modes import leave_mode
from upguard_plugin.capture.operators.owners import Owners
from upguard_plugin.capture.operators.places import NodePlaces, Place, accumulated_parameter
from upguard_plugin.capture.operators.schema import Operator, describe
from upguard_plugin.capture.operators.source import SourceFinder
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.storages import Storages, is_tracked
from upguard_plugin.trace.batch import NONE

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


OUTSIDE = "(outside)"  # the boundary of operators that no module, parameter or node accounts for
_RNG_SLOT = "generator"


@dataclass(frozen=True, slots=True)
class Running:
    """An operator between its inputs and its outputs."""

    operator: Operator
    place: Place
    phase: str
    call: int
    element_owners: tuple[str, ...]  # of a `_foreach_` operator: whom each list element is for


class OperatorProbe(TorchDispatchMode):
    """One mode for the whole run; it looks away outside the selected steps and modules."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would fall back to eager under this mode: another program.
        return True

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.recorder = guard.recorder
        self._guard = guard
        self._position = guard.position
        self._storages = Storages()
        self._nodes = NodePlaces()
        self._sources = SourceFinder()
        self._owners = Owners(guard.names, guard.optimizers)
        self._step = -1

    def attach(self) -> None:
        self.recorder.storages = self._storages
        self.__enter__()

    def detach(self) -> None:
        leave_mode(self)
        self.recorder.storages = None
        self._nodes.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if not recorder.active or recorder.at_work:
            return func(*args, **kwargs)
        running = self._begin(func, args, kwargs)
        result = func(*args, **kwargs)  # what it raises is the user's
        if running is not None:
            self._finish(running, args, kwargs, result)
        return result

    @shielded
    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running | None:
        """Record the inputs. None: the operator is no event."""
        if not isinstance(func, torch._ops.OpOverload):
            return None  # a higher-order operator: what it runs comes by itself
        if self._step != self._position.step:
            self._begin_step()
        operator = describe(func)
        arguments = list(tensors_in(args, kwargs))
        if operator.is_collective:
            for argument in arguments:
                self._storages.lose_sight(argument.tensor)
            return None
        place, phase = self._place(arguments)
        if operator.is_view or not operator.is_observed:
            return None
        if any(is_traceable_wrapper_subclass(argument.tensor) for argument in arguments):
            return None  # the operators on the tensors inside come by themselves
        running = self._running(operator, place, phase, arguments)
        if operator.is_random:
            self._record_generator(running, args, kwargs)
        for argument in arguments:
            if self._has_value(operator, argument):
                moment = "before" if argument.key in operator.written else None
                self._record(running, argument, "input", moment)
        return running

    @shielded
    def _finish(
        self, running: Running, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record what the operator wrote, then what it returned."""
        operator, storages = running.operator, self._storages
        known = set()  # storages whose values are recorded already, or are no results
        for argument in tensors_in(args, kwargs):
            if argument.key in operator.written:
                self._written(running, argument, "after")
            if is_tracked(argument.tensor):
                known.add(argument.tensor.untyped_storage()._cdata)
        for returned in tensors_returned(result):
            tensor = returned.tensor
            if not is_tracked(tensor):
                self._record(running, returned, "output", None)
            elif operator.makes_uninitialised:
                storages.of(tensor).initialised = False
            elif tensor.untyped_storage()._cdata not in known:
                self._written(running, returned, None)

    def _written(self, running: Running, argument: Argument, moment: str | None) -> None:
        """Record what the operator left in a tensor, and that it wrote it."""
        tensor = argument.tensor
        if is_tracked(tensor):
            self._storages.writing(tensor, in_place=moment is not None)
        writer = self._record(running, argument, "output", moment)
        if is_tracked(tensor):
            self._storages.of(tensor).note_writer(tensor, writer)

    def _running(
        self, operator: Operator, place: Place, phase: str, arguments: list[Argument]
    ) -> Running:
        owners: tuple[str, ...] = ()
        if phase == "optimizer" and not place.boundary:
            if operator.is_foreach:
                elements: dict[int, list[torch.Tensor]] = {}
                for argument in arguments:
                    elements.setdefault(argument.element, []).append(argument.tensor)
                elements.pop(NONE, None)
                owners = tuple(self._owners.of(elements[i]) for i in sorted(elements))
            else:
                owner = self._owners.of(argument.tensor for argument in arguments)
                place = Place(owner, place.microbatch, place.source)
        boundary = place.boundary or OUTSIDE
        call = self._position.next_call(f"{boundary} {operator.name} {phase}")
        return Running(operator, place, phase, call, owners)

    def _has_value(self, operator: Operator, argument: Argument) -> bool:
        """Whether an argument holds a value of the run when the operator begins."""
        if not is_tracked(argument.tensor):
            return True
        if argument.key in operator.written and isinstance(argument.key, str):
            return False  # out=: what was in that memory before plays no part
        return self._storages.of(argument.tensor).initialised

    def _place(self, arguments: list[Argument]) -> tuple[Place, str]:
        """Where in the program, and in which phase, the operator runs."""
        position = self._position
        node = torch._C._current_autograd_node()
        if node is None or position.module:  # a module that runs in backward recomputes its forward
            source = self._sources.nearest(depth=5)
            place = Place(position.module, position.microbatch, source)
            self._nodes.note(place)
            return place, position.phase
        parameter = accumulated_parameter(node)
        if parameter is not None:
            name = self._guard.names.of(parameter) or OUTSIDE
            return Place(name, position.microbatch, None), "accumulate"
        place = self._nodes.of(node)
        if place is None:
            place = Place(node.name(), position.microbatch, None)
        return place, "backward"

    def _record(self, running: Running, argument: Argument, role: str, moment: str | None) -> int:
        place = running.place
        boundary = place.boundary or OUTSIDE
        if running.element_owners and argument.element != NONE:
            boundary = running.element_owners[argument.element] or OUTSIDE
        return self.recorder.record(
            boundary, argument.tensor, role=role, slot=argument.slot, phase=running.phase,
            operator=running.operator.name, moment=moment, microbatch=place.microbatch,
            call=running.call, source=place.source,
        )  # fmt: skip

    def _record_generator(
        self, running: Running, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The state that the operator will draw from is one of its inputs."""
        generator = kwargs.get("generator")
        generator = generator if generator is not None else torch.default_generator
        state = generator.get_state()
        argument = Argument(_RNG_SLOT, _RNG_SLOT, NONE, state)
        self._record(running, argument, "rng", None)

    def _begin_step(self) -> None:
        self._step = self._position.step
        self._nodes.clear()
        self._owners.forget()
