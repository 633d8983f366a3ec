"""Where the operator that is running belongs: boundary, phase, micro-batch, source line.

In:  the position that the other probes keep, the autograd engine's node, the optimizers.
Out: a `Place` and a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from upguard_plugin.capture.operators.arguments import Argument
from upguard_plugin.capture.operators.owners import Owners
from upguard_plugin.capture.operators.places import (
    OUTSIDE,
    NodePlaces,
    Place,
    accumulated_parameter,
    is_recomputing,
)
from upguard_plugin.capture.operators.source import SourceFinder
from upguard_plugin.capture.probe import Host
from upguard_plugin.trace.batch import NONE

_current_node = torch._C._current_autograd_node
_OF_PARAMETERS = ("optimizer", "clip")  # phases whose operators work for parameters
_ACCUMULATE, _BACKWARD, _RECOMPUTE = "accumulate", "backward", "recompute"


class Locator:
    """Knows the places of a step's operators."""

    def __init__(self, guard: Host) -> None:
        self._guard = guard
        self._position = guard.position
        self._nodes = NodePlaces()
        self._sources = SourceFinder()
        self._owners = Owners(guard.names, guard.optimizers)

    def place_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Place, str]:
        """Where the operator that is running with these belongs, and its phase."""
        position = self._position
        phase = position.phase
        if phase in _OF_PARAMETERS and not position.module and _current_node() is None:
            return self._parameter_place(phase, args, kwargs), phase
        return self._locate()

    def place_quickly(self) -> None:
        """Note the place of an operator that is no event: its backward may be one."""
        if torch.is_grad_enabled():
            self._locate()

    def note_node(self, node: torch.autograd.graph.Node | None, place: Place) -> None:
        """Remember the place of a node that somebody made."""
        if node is not None:
            self._nodes.note_node(node, place)

    def note_write(
        self, written: torch.Tensor, arguments: Sequence[Argument], place: Place
    ) -> None:
        """Remember who has just written a tensor: if that is a view, nodes may come of it."""
        if written._is_view() and any(a.tensor.requires_grad for a in arguments):
            self._nodes.note_written_view(place)

    def element_owners(self, arguments: list[Argument], phase: str) -> tuple[str, ...]:
        """Of an operator on lists: the parameter that each element is for."""
        if phase not in _OF_PARAMETERS:
            return ()
        elements: dict[int, list[torch.Tensor]] = {}
        for argument in arguments:
            if argument.element != NONE:
                elements.setdefault(argument.element, []).append(argument.tensor)
        return tuple(self._owners.of(elements[i]) or OUTSIDE for i in sorted(elements))

    def forget(self) -> None:
        """To be called when a step is over."""
        self._nodes.clear()
        self._owners.forget()

    def _locate(self) -> tuple[Place, str]:
        position = self._position
        node = _current_node()
        if node is None:
            return self._forward_place(position.microbatch), position.phase
        if position.module:  # a module that runs in backward repeats its forward
            return self._forward_place(position.module_microbatch), position.phase
        parameter = accumulated_parameter(node)
        if parameter is not None:
            name = self._guard.names.of(parameter) or OUTSIDE
            return self._nodes.place(name, position.microbatch, None), _ACCUMULATE
        place = self._nodes.of(node)
        if place is None:
            place = self._nodes.place(node.name(), position.microbatch, None)
        if is_recomputing():
            source = self._sources.nearest(depth=5)
            place = self._nodes.place(place.boundary, place.microbatch, source)
            self._nodes.note(place)
            return place, _RECOMPUTE
        if torch.is_grad_enabled():  # this backward will have a backward of its own
            self._nodes.note(place)
        return place, _BACKWARD

    def _parameter_place(self, phase: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Place:
        source = self._sources.nearest(depth=6)
        # An update goes from parameter to parameter; a norm is of all of them.
        owner_of = self._owners.of if phase == "optimizer" else self._owners.find
        owner = owner_of((*args, *kwargs.values()) if kwargs else args)
        place = self._nodes.place(owner, self._position.microbatch, source)
        if torch.is_grad_enabled():
            self._nodes.note(place)
        return place

    def _forward_place(self, microbatch: int) -> Place:
        source = self._sources.nearest(depth=6)
        place = self._nodes.place(self._position.module, microbatch, source)
        self._nodes.note(place)
        return place
