"""Optimizers: hyper-parameters, group membership, states, masters, and the weights they write.

In:  the optimizers given to `enable`, others that step on the model's parameters, and any object
     with `param_groups`, `state` and `step`.
Out: at `start` and after each step their state, at `start` also masters rounded to their weights'
     dtype; before each step the gradients it will use and the
     hyper-parameters as they are then; after it the weights.

What each tensor of an optimizer is called, `Masters` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.clipping import Replacement
from upguard_plugin.capture.gradients import GradientProbe
from upguard_plugin.capture.held import (
    Groups,
    groups_of,
    innermost,
    leaves_of,
    parameters_of,
    state_of,
)
from upguard_plugin.capture.masters import Masters
from upguard_plugin.capture.parts import Part
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.capture.tensors import tensors_in


@dataclass(slots=True)
class Watched:
    """An optimizer and the name its scalars have."""

    name: str  # "optimizer", or "optimizer0", "optimizer1" where several were given
    optimizer: Any
    call: int = 0  # n-th step of these parameters inside the run's current step


class OptimizerProbe:
    """Watches the steps of optimizers."""

    def __init__(
        self, guard: Host, gradients: GradientProbe, on_update: Callable[[Sequence[str]], None]
    ) -> None:
        """on_update: called with the names of the parameters that a step has just written."""
        self.recorder = guard.recorder
        self._guard = guard
        self._gradients = gradients
        self._on_update = on_update
        self._states_wanted = any(map(guard.recorder.wants, ("master", "optimizer_state")))
        given = [innermost(optimizer) for optimizer in guard.optimizers]
        numbers = [""] if len(given) == 1 else [str(i) for i in range(len(given))]
        self.watched = [
            Watched(f"optimizer{number}", optimizer)
            for number, optimizer in zip(numbers, given, strict=True)
        ]
        self.masters = Masters(guard.names)
        # What an adapter knows of states by parameter, where they lie behind the optimizer;
        self.state_of: Callable[[Any], Mapping[Any, Any]] = state_of
        # ... of groups, where a step shows the optimizer only some of them;
        self.groups_at_rest: Callable[[Any], Groups] = groups_of
        # ... and what it records itself when an optimizer is about to step.
        self.on_step: Callable[[], None] = _nothing
        self._depth = 0  # of steps that have begun: a wrapper's and a subclass's step hold others
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hook into the steps of all torch optimizers, and of those given that are none."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for watched in self.watched:
            optimizer = watched.optimizer
            if not hasattr(optimizer, "param_groups"):
                kind = type(optimizer).__name__
                self.recorder.note(f"{kind} has no param_groups: its state was not recorded")
            if not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "step"):
                self._handles.append(_replace_step(self, optimizer))

    def detach(self) -> None:
        """Leave every optimizer as it was."""
        while self._handles:
            self._handles.pop().remove()

    def record_start(self, now: Snapshot, *, states: bool = True) -> None:
        """Record masters, states, hyper-parameters and group membership as they are found.

        states: False: without masters and states.
        """
        self._depth = 0  # a step that raised has never ended
        self.masters.find(p for watched in self.watched for p in parameters_of(watched.optimizer))
        for watched in self.watched:
            groups = self.groups_at_rest(watched.optimizer)
            held = [parameter for _, parameters in groups for parameter in parameters]
            if states:
                owned, masters = self.masters.split(held)
                self._record_state(now, watched.optimizer, owned, masters)
                self._record_rounded(now, masters)
            self._record_membership(now, watched.name, groups)
            self._record_groups(now, watched.name, enumerate(group for group, _ in groups))

    @shielded
    def _before_step(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        watched = self._find(optimizer)
        if watched is not None and self._depth == 0:
            self._guard.begin_step_if_needed()  # LBFGS runs the first forward inside its step
        self._depth += 1
        if watched is None or self._depth > 1 or not self.recorder.active:
            return
        self.on_step()
        position = self._guard.position
        position.phase = "optimizer"
        owned, masters = self.masters.split(parameters_of(optimizer))
        first = (owned + masters)[0].name if owned or masters else ""
        with Snapshot(self._guard, "optimizer"):
            watched.call = position.next_call(f"{watched.name} steps {first}")
        if owned:
            self._gradients.record_complete([(part.name, part.held) for part in owned])
        for role, parts in (
            ("grad", [part for part in masters if self.masters.lies_in_weight(part)]),
            ("main_grad", [part for part in masters if not self.masters.lies_in_weight(part)]),
        ):
            if parts:
                grads = [(part.name, _grad_of(part)) for part in parts]
                self._gradients.record_parts(grads, role=role)
        self._gradients.mark_complete()
        with Snapshot(self._guard, "optimizer") as now:
            self._record_groups(now, watched.name, self._stepping(optimizer), step=True)

    @shielded
    def _after_step(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        self._depth = max(self._depth - 1, 0)
        watched = self._find(optimizer)
        if watched is None or self._depth > 0 or not self.recorder.active:
            return
        owned, masters = self.masters.split(parameters_of(optimizer))
        with Snapshot(self._guard, "optimizer", call=watched.call) as now:
            if self._guard.config.level != "stage":
                self._record_state(now, optimizer, owned, masters)
            now.tensors("param", "value", [(part.name, part.held) for part in owned])
        self._on_update([part.name for part in owned])

    def _find(self, optimizer: Any) -> Watched | None:
        for watched in self.watched:
            if watched.optimizer is optimizer:
                return watched
        owned = (self._guard.names.of(p) for p in parameters_of(optimizer))
        if self._depth > 0 or not any(owned):
            return None
        number = len(self.watched) or ""
        self.watched.append(Watched(f"optimizer{number}", optimizer))
        self.recorder.note(
            f"{type(optimizer).__name__} was not given to enable: its state is recorded from its"
            " first step on"
        )
        return self.watched[-1]

    def _stepping(self, optimizer: Any) -> list[tuple[int, Mapping[str, Any]]]:
        """The groups that a step is about to update, each with its place among all."""
        places = {id(group): i for i, (group, _) in enumerate(self.groups_at_rest(optimizer))}
        groups = enumerate(getattr(optimizer, "param_groups", ()))
        return [(places.get(id(group), i), group) for i, group in groups if group["params"]]

    def _record_state(
        self, now: Snapshot, optimizer: Any, owned: list[Part], masters: list[Part]
    ) -> None:
        if not self._states_wanted:
            return
        others = [part for part in masters if not self.masters.lies_in_weight(part)]
        now.tensors("master", "master", [(part.name, part.of(part.held)) for part in others])
        by_slot: dict[str, list[tuple[str, Tensor]]] = {}
        numbers = []
        states = self.state_of(optimizer)
        for part in owned + masters:
            for slot, value in leaves_of(states.get(part.held)):
                if isinstance(value, Tensor):
                    by_slot.setdefault(slot, []).append((part.name, part.of(value)))
                else:
                    numbers.append((part.name, slot, value))
        for slot, named in by_slot.items():
            now.tensors("optimizer_state", slot, named)
        for name, slot, value in numbers:
            now.value(name, "optimizer_state", slot, value)

    def _record_rounded(self, now: Snapshot, masters: list[Part]) -> None:
        """Each master in its weight's dtype, slot `rounded`: what its weight should be.

        One after the other: no more than one copy is alive.
        """
        for part in masters:
            weight, master = self._guard.names.parameters.get(part.name), part.held
            if weight is None or part.fragment is not None or weight.shape != master.shape:
                continue
            if weight.dtype == master.dtype:
                continue
            with _disable_current_modes():  # the copy is ours: no mode is to see it made
                rounded = master.detach().to(weight.dtype)
            now.tensors("master", "rounded", [(part.name, rounded)])

    def _record_membership(self, now: Snapshot, optimizer: str, groups: Groups) -> None:
        for index, (_, parameters) in enumerate(groups):
            names = sorted(name for p in parameters for name in self.masters.names_of(p))
            now.value(f"{optimizer}.group{index}", "scalar", "params", "\n".join(names))

    def _record_groups(
        self,
        now: Snapshot,
        optimizer: str,
        groups: Iterable[tuple[int, Mapping[str, Any]]],
        *,
        step: bool = False,
    ) -> None:
        for index, group in groups:
            boundary = f"{optimizer}.group{index}"
            now.call = self._guard.position.next_call(f"{boundary} steps") if step else 0
            for key in sorted(group.keys() - {"params"}):
                for path, value in tensors_in(group[key], key):
                    if value is None:
                        continue
                    # 1 and 1.0 are the same setting.
                    plain = float(value) if type(value) is int else value
                    now.value(f"{boundary}.{path}", "scalar", "0", plain)


def _nothing() -> None:
    """No adapter has anything to record here."""


def _grad_of(part: Part) -> Tensor | None:
    return None if part.held.grad is None else part.of(part.held.grad)


def _replace_step(probe: OptimizerProbe, optimizer: Any) -> Replacement:
    return Replacement(
        optimizer,
        "step",
        before=lambda *_a, **_k: probe._before_step(optimizer),
        after=lambda _result, *_a, **_k: probe._after_step(optimizer),
    )
