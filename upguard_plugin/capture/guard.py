"""The one object a training loop holds.

In:  the user's models and optimizers, a config, and what the loop says (`step`, `microbatch`, ...).
Out: events to the recorder, from the probes that are attached here and from `observe`.

    guard = upguard_plugin.enable(model, optimizer)     # before the loop
    guard.step()                                        # once per optimizer step
    guard.close()
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.arguments import (
    expect_batch,
    expect_event,
    expect_microbatch,
    expect_scalar,
    expect_step,
)
from upguard_plugin.capture.checkpoints import CheckpointProbe
from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.collectives.owners import ParameterOwner
from upguard_plugin.capture.data import DataProbe
from upguard_plugin.capture.idle_settings import idle_globs, idle_placements
from upguard_plugin.capture.modules import ModuleProbe
from upguard_plugin.capture.names import Models, ParameterNames
from upguard_plugin.capture.operators.probe import OperatorProbe
from upguard_plugin.capture.placements import Placements
from upguard_plugin.capture.probe import Probe
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.capture.run import say
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.slices import FlatTensors
from upguard_plugin.capture.state import StateProbe
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.fingerprint.dtensors import placement_of
from upguard_plugin.fingerprint.parts import is_composite
from upguard_plugin.records import NEVER_FIRED, Layout, Placement


class Guard:
    """Records one rank of one run, from `enable` to `close`."""

    rank: int = 0
    world_size: int = 1
    layout: Layout = Layout()
    speaks: bool = False  # to the user, on behalf of all ranks
    collectives: CollectiveProbe | None = None  # adapters name groups and buffers there

    def __init__(
        self,
        config: UpGuardConfig,
        recorder: Recorder,
        models: Models,
        optimizers: tuple[Any, ...],
        names: ParameterNames,
        placements: Placements,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.position = recorder.position
        self.models = models
        self.optimizers = optimizers
        self.names = names
        self.probes: list[Probe] = []
        self.placements = placements
        self.placements.parameters = names.parameters
        self._flat_tensors = FlatTensors(names, placements)
        self.states = StateProbe(self)
        self.batches = DataProbe(self)
        # Adapters say there what they know of formats.
        self.checkpoints = CheckpointProbe(self, self.states)
        self.mark: str | None = None  # what an adapter says of the step that ends, see `step`
        self._begun = False  # whether the state at the start of this step has been recorded
        self._closed = False
        self._pid = os.getpid()
        recorder.select(config.selected_step(0))

    @property
    def active(self) -> bool:
        """Whether events are recorded now: the step is selected and nothing has failed."""
        return self.recorder.active

    def attach(self) -> None:
        """Hook all probes of the config's level in."""
        # In this order: a root module's batch is recorded before its own events.
        self.probes = [self.states, self.batches, ModuleProbe(self), self.checkpoints]
        if torch.distributed.is_available() and not CollectiveProbe.in_use():
            self.collectives = self._collective_probe()
            self.probes.append(self.collectives)
        if self.config.level == "op":
            self.probes.append(OperatorProbe(self))
        for probe in self.probes:
            probe.attach()
        self._tell(idle_globs(self.config, self.names))
        atexit.register(self._close_at_exit)

    def _collective_probe(self) -> CollectiveProbe:
        owner = ParameterOwner({**self.names.parameters, **self.names.buffers})
        probe = CollectiveProbe(self.recorder, owners=[owner])
        probe.holders.append(owner.stretches_in)
        # Dense axes last: an expert axis with the same ranks does not take their name.
        for axis in sorted(self.layout.axes, key=lambda axis: axis.mesh, reverse=True):
            if axis.size > 1:
                probe.groups.name(axis.ranks, axis.name)
        return probe

    def placement(
        self, boundary: str, role: str, slot: str, tensor: torch.Tensor
    ) -> Placement | None:
        """Which part of a logical tensor this is; None where nothing is known.

        A DTensor says it itself; for all others the rules do. What is made of data and scales has
        none: no placement describes both.
        """
        own = placement_of(tensor)
        if own is None and is_composite(tensor):
            self.placements.rule_of(boundary)  # it names something all the same
            return None
        return self.placements.of(boundary, role, slot, tensor.shape) if own is None else own

    @shielded
    def begin_step_if_needed(self) -> None:
        """Record the state found at the start of a step, once, at its first data or forward."""
        if self._begun or not self.recorder.active:
            return
        self._begun = True
        with self.position.outside_microbatches("start"):
            self.states.record_start()

    @shielded
    def step(self, *, iteration: int | None = None, mark: str | None = None) -> None:
        """Say that an optimizer step is over; the next event belongs to the next step.

        iteration: the framework's own number of the step that ends. mark: "skipped" or "rerun".
        Raises ConfigError for other types, at step 0.
        """
        expect_step(iteration, mark)
        if iteration is not None:
            self.position.iteration = int(iteration)
        if self._begun:
            self.states.record_end()
        self._begun = False
        self.recorder.finish_step(mark=mark or self.mark)
        self.mark = None
        self.recorder.select(self.config.selected_step(self.position.step))

    @shielded
    def microbatch(self, k: int) -> None:
        """Say that micro-batch k of the step begins; k counts from 0.

        Raises ConfigError for anything else, at step 0.
        """
        expect_microbatch(k)
        self.position.microbatch = int(k)

    @shielded
    def data(self, name: str, tensor: Any, batch_dim: int = 0) -> None:
        """Record a batch that the model does not receive itself, whole and per sample.

        tensor: a tensor, or a nested structure of them; batch_dim: the dim that counts samples.
        Raises ConfigError for a name that is no text, at step 0.
        """
        expect_batch(name, batch_dim)
        if self.recorder.active:
            self.begin_step_if_needed()
            self.batches.record(name, tensor, batch_dim)

    @shielded
    def scalar(self, name: str, value: float | torch.Tensor) -> None:
        """Record a number or a tensor with one element: a loss, a gradient norm.

        Never waits for a GPU: of a tensor there only the fingerprint is kept, not the value.
        Raises ConfigError for what is no number, at step 0.
        """
        expect_scalar(name, value)
        if not self.recorder.active:
            return
        self.begin_step_if_needed()
        call = self.position.next_call(f"{name}:scalar")
        # What a loop says of itself may be for its log only; the phases of the training's own
        # scalars (learning rate, gradient norm) are for those that it surely uses.
        phase = self.position.phase
        phase = "loss" if phase in ("start", "clip", "optimizer") else phase
        if not isinstance(value, torch.Tensor):
            self.recorder.record_number(name, value, call=call, phase=phase)
            return
        number = _number_in(value) if value.is_cpu and value.numel() == 1 else None
        self.recorder.record(name, value, role="scalar", call=call, value=number, phase=phase)

    @shielded
    def observe(
        self,
        boundary: str,
        tensor: torch.Tensor,
        *,
        role: str = "output",
        slot: str = "0",
        phase: str | None = None,
        operator: str | None = None,
        placement: str | Placement | None = None,
    ) -> None:
        """Record any tensor at a boundary of your own; the n-th time in a step is its call n.

        placement: a spec in the placement grammar; without one the rules given to `enable` apply.
        Raises ConfigError for what is no tensor and for an unknown role or phase, PlacementError
        for a misfit, at step 0.
        """
        expect_event(boundary, tensor, role, slot, phase, placement)
        if not self.recorder.active:
            return
        self.begin_step_if_needed()
        if isinstance(placement, str):
            placement = self.placements.resolve(placement, boundary, tensor.shape)
        elif placement is None:
            placement = self.placement(boundary, role, slot, tensor)
        call = self.position.next_call(f"{boundary}:{role}:{slot}")
        is_number = role == "scalar" and tensor.is_cpu and tensor.numel() == 1
        self.recorder.record(
            boundary, tensor, role=role, slot=slot, phase=phase, operator=operator,
            placement=placement, call=call, value=_number_in(tensor) if is_number else None,
        )  # fmt: skip

    def slices(
        self, flat: torch.Tensor, elements: Mapping[str, tuple[int, int]], *, axis: str = "dp"
    ) -> None:
        """Say which elements of the parameters a flat tensor of an optimizer holds on this rank.

        flat: one dim; the elements lie in it one after the other, padding behind them. elements:
        by parameter, (start, end) in the flattened parameter. axis: its ranks hold the others.
        Say it before the first step. Raises ConfigError for what the models and `flat` do not have.
        """
        self._flat_tensors.add(flat, elements, axis)
        self.states.optimizers.masters.fragments_of = self._flat_tensors.fragments_of

    def close(self) -> None:
        """Take every hook out and end the trace. An unfinished step is not part of it."""
        if self._closed or os.getpid() != self._pid:  # a forked child has no part in the trace
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        for probe in reversed(self.probes):
            probe.detach()
        self._tell(self._idle())
        self.recorder.close()

    def _idle(self) -> Iterator[str]:
        """What is to be said at the end of settings that named nothing."""
        if self.position.step and not self.recorder.failure:
            yield from self.recorder.idle(self.config)
            yield from idle_placements(self.config, self.placements.idle())

    def _tell(self, idle: Iterable[str]) -> None:
        """Say what was asked for and is not there, in the trace and to the user."""
        for sentence in idle:
            self.recorder.note(f"{NEVER_FIRED}{sentence}")
            if self.speaks:
                say(sentence)

    def _close_at_exit(self) -> None:
        crash = getattr(sys, "last_value", None)
        if crash is not None:
            self.recorder.fail(f"the training ended with {type(crash).__name__}")
        self.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.recorder.fail(f"the training ended with {kind.__name__}")
        self.close()


def _number_in(tensor: torch.Tensor) -> float | None:
    with _disable_current_modes():  # no mode of the user's, nor of ours, sees this read
        number = tensor.detach().item()
    return None if isinstance(number, complex) else float(number)
