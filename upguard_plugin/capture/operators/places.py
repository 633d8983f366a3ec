"""Which module an autograd node belongs to, and what the engine is doing.

In forward, an operator's node has just been numbered when the operator reaches us: the number leads
to the module that was running. In backward the engine tells the node, the number tells the module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from upguard_plugin.records import Source
from upguard_plugin.trace.batch import NONE

_NO_NUMBER = (1 << 64) - 1  # of nodes that autograd does not number: AccumulateGrad
# Nodes that no operator shows. `mul_` is numbered before the `clone` of what it saves, which is
# seen first; a view of what was written is made anew by whoever reads it; and a write to a view is
# followed by the node that cuts the gradient (CopySlices) and by the view's own.
_MOST_UNSEEN = 8  # a larger step is another thread's count
_NODES_OF_A_VIEW = 2

OUTSIDE = "(outside)"  # the boundary of operators that no module, parameter or node accounts for


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the user's program an operator was called."""

    boundary: str = OUTSIDE  # a module's or a parameter's name
    microbatch: int = NONE
    source: Source | None = None


class NodePlaces:
    """Places of the forward operators, by the number of their autograd node."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._interned: dict[tuple[str, int, int], Place] = {}
        self._last = _NO_NUMBER
        self._written: tuple[int, Place] = (_NO_NUMBER, Place())

    def __len__(self) -> int:
        return len(self._places)

    def place(self, boundary: str, microbatch: int, source: Source | None) -> Place:
        """The `Place` of these, made once. Sources are interned by whoever found them."""
        name = (boundary, microbatch, id(source))
        place = self._interned.get(name)
        if place is None:
            place = self._interned[name] = Place(boundary or OUTSIDE, microbatch, source)
        return place

    def note(self, place: Place) -> None:
        """Remember the place of the operator that is running in forward."""
        # Operators without a node leave the counter alone: the first one with that number made it.
        number = torch._C._autograd._get_sequence_nr() - 1
        if number == self._last:
            return
        if 1 < number - self._last <= _MOST_UNSEEN:
            self._note_unseen(number, place)
        self._last = number
        self._places.setdefault(number, place)

    def note_written_view(self, place: Place) -> None:
        """The operator that was noted last has written a part of a tensor that has a gradient."""
        self._written = (self._last, place)

    def _note_unseen(self, number: int, place: Place) -> None:
        """Nodes since the last operator: after a write to a view, and before the running one."""
        wrote, place_of_write = self._written
        for unseen in range(self._last + 1, number):
            is_of_write = wrote == self._last and unseen <= wrote + _NODES_OF_A_VIEW
            self._places.setdefault(unseen, place_of_write if is_of_write else place)

    def note_node(self, node: torch.autograd.graph.Node, place: Place) -> None:
        """Remember the place of a node whose maker is known, whatever was called inside of it."""
        self._places[node._sequence_nr()] = place

    def of(self, node: torch.autograd.graph.Node) -> Place | None:
        """The place whose backward the node is; None if its forward was not seen."""
        return self._places.get(node._sequence_nr())

    def clear(self) -> None:
        """Forget the nodes of a step that is over."""
        self._places.clear()
        self._interned.clear()
        self._last = _NO_NUMBER


def accumulated_parameter(node: torch.autograd.graph.Node) -> torch.Tensor | None:
    """The tensor that an AccumulateGrad node accumulates into; None for other nodes."""
    return node.variable if node._sequence_nr() == _NO_NUMBER else None  # type: ignore[attr-defined]


def is_recomputing() -> bool:
    """Whether what runs inside a backward node is forward code, run again by checkpointing."""
    if not torch.is_grad_enabled():
        return False
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return True  # no backward of this backward is wanted: it would not switch gradients on
    # Checkpointing that does not re-enter the engine hangs its own hooks around the forward.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
