"""Which module an autograd node belongs to.

In forward, an operator's node has just been numbered when the operator reaches us: the number leads
to the module that was running. In backward the engine tells the node, the number tells the module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from upguard_plugin.records import Source
from upguard_plugin.trace.batch import NONE

_NO_NUMBER = (1 << 64) - 1  # of nodes that autograd does not number: AccumulateGrad


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the user's program an operator was called."""

    boundary: str = ""  # the module's name; "" outside of modules
    microbatch: int = NONE
    source: Source | None = None


class NodePlaces:
    """Places of the forward operators, by the number of their autograd node."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}

    def note(self, place: Place) -> None:
        """Remember the place of the operator that is running in forward."""
        # Operators without a node leave the counter alone: the first one with that number made it.
        self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)

    def of(self, node: torch.autograd.graph.Node) -> Place | None:
        """The place whose backward the node is; None if its forward was not seen."""
        return self._places.get(node._sequence_nr())

    def clear(self) -> None:
        self._places.clear()


def accumulated_parameter(node: torch.autograd.graph.Node) -> torch.Tensor | None:
    """The tensor that an AccumulateGrad node accumulates into; None for other nodes."""
    return node.variable if node._sequence_nr() == _NO_NUMBER else None
