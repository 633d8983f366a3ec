"""What the guard and its probes know of each other.

A probe is hooked into the training and tells the recorder what it sees. Its host, the guard, knows
where in the training a call happens, what a tensor is called and which part of a whole it is.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.names import Models, ParameterNames
from upguard_plugin.capture.placements import Placements
from upguard_plugin.capture.position import Position
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.records import Layout, Placement


class Probe(Protocol):
    """Something that is hooked into the training, and can be taken out without a trace."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...


class Batches(Protocol):
    """The batches that came in, as far as others need to know."""

    @property
    def num_samples(self) -> int | None:
        """Of the last one; None where none was seen."""
        ...


class Host(Protocol):
    """A guard, as far as its probes know it."""

    @property
    def config(self) -> UpGuardConfig: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def position(self) -> Position: ...
    @property
    def models(self) -> Models: ...
    @property
    def optimizers(self) -> tuple[Any, ...]: ...
    @property
    def names(self) -> ParameterNames: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def collectives(self) -> CollectiveProbe | None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def placements(self) -> Placements: ...
    def placement(
        self, boundary: str, role: str, slot: str, tensor: torch.Tensor
    ) -> Placement | None:
        """Which part of a logical tensor this is; None where nothing is known."""
        ...

    def begin_step_if_needed(self) -> None:
        """Record the state found at the start of a step, once."""
        ...
