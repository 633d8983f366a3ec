"""Everything a step finds before it begins, and what it leaves behind.

In:  the guard's models and optimizers; `record_start` at the first data or forward of a step,
     `record_end` when it is over.
Out: phase `start`: parameters, buffers, masters, optimizer state, hyper-parameters, loss scale,
     gradients left over, random generators. At the end: the weights that no watched optimizer
     wrote, and the buffers.

What an optimizer step, a clip or an accumulation does in between is recorded by `optimizers`,
`clipping` and `gradients`; this is where they are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from upguard_plugin.capture.clipping import ClippingProbe
from upguard_plugin.capture.gradients import GradientProbe, NamedParameter
from upguard_plugin.capture.optimizers import OptimizerProbe
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.rng import Source, read_generators
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.fingerprint.parts import is_composite


class StateProbe:
    """Watches all state of a run. Adapters add what they know to `generators` and `sources`."""

    def __init__(self, guard: Host) -> None:
        self.recorder = guard.recorder
        self.generators: dict[str, Source] = {}  # further generators, recorded as "rng.<name>"
        # Further state: called at `start` and, with phase `optimizer`, at the end of the step.
        self.sources: list[Callable[[Snapshot], None]] = []
        # What is valid of a parameter between steps, where it is gathered during the forward only.
        self.at_rest: Callable[[str, Tensor], Tensor | None] = _whole
        self._guard = guard
        self.gradients = GradientProbe(guard)
        self.optimizers = OptimizerProbe(guard, self.gradients, self.mark_recorded)
        self.clipping = ClippingProbe(guard, self.gradients, self.optimizers.masters.name_of)
        self._started: int | None = None  # the last step whose start is recorded
        self._updated: set[str] = set()  # parameters recorded after an optimizer's step

    def attach(self) -> None:
        """Hook into parameters, optimizers and torch's clipping. `detach` undoes all of it."""
        self.gradients.watch(self._guard.names.parameters.items())
        self.optimizers.attach()
        self.clipping.attach()

    def detach(self) -> None:
        """Leave models, optimizers and torch as they were."""
        self.clipping.detach()
        self.optimizers.detach()
        self.gradients.detach()

    @shielded
    def record_start(self) -> None:
        """Record the state the current step finds; the first call in a step counts."""
        step = self._guard.position.step
        if self._started == step or not self.recorder.active:
            return
        # At level stage what only optimizers hold is recorded where a stretch of steps begins:
        # behind that it shows in the weights.
        is_first = self._guard.config.level != "stage" or self._started != step - 1
        self._started = step
        self._updated.clear()
        names = self._guard.names
        names.refresh()
        parameters = list(names.parameters.items())
        self.gradients.watch(parameters)
        with Snapshot(self._guard, "start") as now:
            self.record_weights(now)
            self.record_optimizers(now, states=is_first)
            self.record_generators(now)
            self.gradients.record_start(now, parameters)

    def record_weights(self, now: Snapshot) -> None:
        """Record parameters, as far as they are valid between steps, and buffers."""
        names = self._guard.names
        now.tensors("param", "value", self._parts_at_rest(list(names.parameters.items())))
        now.tensors("param", "tied", names.tied)
        now.tensors("buffer", "value", names.buffers.items())

    def record_optimizers(self, now: Snapshot, *, states: bool = True) -> None:
        """Record masters, optimizer state, hyper-parameters, and the loss scale.

        states: False: without masters and optimizer state.
        """
        self.optimizers.record_start(now, states=states)
        self.clipping.record_start(now)
        for source in self.sources:
            source(now)

    def record_generators(self, now: Snapshot) -> None:
        """Record the states of all random generators."""
        for boundary, state in read_generators(self._guard.names.modules, self.generators):
            now.value(boundary, "rng", "state", state)

    @shielded
    def record_end(self) -> None:
        """Record what the step leaves and nothing has recorded yet, before the step ends."""
        if self._started != self._guard.position.step or not self.recorder.active:
            return
        names = self._guard.names
        # All of them: kernels such as batch norm's write without moving the version counter.
        with Snapshot(self._guard, "forward") as now:
            now.tensors("buffer", "value", names.buffers.items())
        left = [
            (name, parameter)
            for name, parameter in names.parameters.items()
            if parameter.requires_grad and name not in self._updated
        ]
        with Snapshot(self._guard, "optimizer") as now:
            now.tensors("param", "value", self._parts_at_rest(left))
            now.tensors("param", "tied", names.tied)
            for source in self.sources:
                source(now)
            # A generator that nobody draws from ends every step as it began it: whatever its state
            # is, it moves nothing, and a comparison can tell.
            self.record_generators(now)

    def _parts_at_rest(self, parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
        if self.at_rest is not _whole:  # no slice can be taken of data and scales
            parameters = [(name, p) for name, p in parameters if not is_composite(p)]
        parts = ((name, self.at_rest(name, parameter)) for name, parameter in parameters)
        return [(name, part) for name, part in parts if part is not None]

    def mark_recorded(self, names: Sequence[str]) -> None:
        """Say that what this step leaves of these parameters is recorded."""
        self._updated.update(names)


def _whole(name: str, parameter: Tensor) -> Tensor:
    return parameter
