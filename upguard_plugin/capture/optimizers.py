"""Optimizers: hyper-parameters, group membership, states, masters, and the weights they write.

In:  the optimizers given to `enable`, others that step on the model's parameters, and any object
     with `param_groups`, `state` and `step`.
Out: at `start` and after each step their state, at `start` also masters rounded to their weights'
     dtype; before each step the gradients it will use and the
     hyper-parameters as they are then; after it the weights.

A parameter of an optimizer that no model has is a master: it takes the name of the parameter whose
`main_param` it is (Megatron), else of the one that stands at its place in order and has its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.clipping import Replacement
from upguard_plugin.capture.gradients import GradientProbe, NamedParameter
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.capture.tensors import tensors_in

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


@dataclass(slots=True)
class Watched:
    """An optimizer and the name its scalars have."""

    name: str  # "optimizer", or "optimizer0", "optimizer1" where several were given
    optimizer: Any
    call: int = 0  # n-th step of it inside the run's current step


class OptimizerProbe:
    """Watches the steps of optimizers."""

    def __init__(
        self, guard: Guard, gradients: GradientProbe, on_update: Callable[[Sequence[str]], None]
    ) -> None:
        """on_update: called with the names of the parameters that a step has just written."""
        self.recorder = guard.recorder
        self._guard = guard
        self._gradients = gradients
        self._on_update = on_update
        given = [_innermost(optimizer) for optimizer in guard.optimizers]
        numbers = [""] if len(given) == 1 else [str(i) for i in range(len(given))]
        self._watched = [
            Watched(f"optimizer{number}", optimizer)
            for number, optimizer in zip(numbers, given, strict=True)
        ]
        self._masters: dict[int, str] = {}
        self._depth = 0  # of steps that have begun: a wrapper's and a subclass's step hold others
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hook into the steps of all torch optimizers, and of those given that are none."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for watched in self._watched:
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

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a model's parameter or of the one it is the master of."""
        return self._guard.names.of(parameter) or self._masters.get(id(parameter))

    def record_start(self, now: Snapshot) -> None:
        """Record masters, states, hyper-parameters and group membership as they are found."""
        self._depth = 0  # a step that raised has never ended
        self._name_masters()
        for watched in self._watched:
            self._record_state(now, watched.optimizer)
            self._record_rounded(now, watched.optimizer)
            self._record_groups(now, watched, membership=True)

    @shielded
    def _before_step(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        watched = self._find(optimizer)
        if watched is not None and self._depth == 0:
            self._guard.begin_step_if_needed()  # LBFGS runs the first forward inside its step
        self._depth += 1
        if watched is None or self._depth > 1 or not self.recorder.active:
            return
        position = self._guard.position
        position.phase = "optimizer"
        with Snapshot(self._guard, "optimizer"):
            watched.call = position.next_call(watched.name)
        owned, masters = self._split(optimizer)
        if owned:
            self._gradients.record_complete(owned)
        if masters:
            self._gradients.record_complete(masters, role="main_grad")
        self._gradients.mark_complete()
        with Snapshot(self._guard, "optimizer", call=watched.call) as now:
            self._record_groups(now, watched, membership=False)

    @shielded
    def _after_step(self, optimizer: Any, _args: Any = (), _kwargs: Any = None) -> None:
        self._depth = max(self._depth - 1, 0)
        watched = self._find(optimizer)
        if watched is None or self._depth > 0 or not self.recorder.active:
            return
        with Snapshot(self._guard, "optimizer", call=watched.call) as now:
            self._record_state(now, optimizer)
            owned, _ = self._split(optimizer)
            now.tensors("param", "value", owned)
        self._on_update([name for name, _ in owned])

    def _find(self, optimizer: Any) -> Watched | None:
        for watched in self._watched:
            if watched.optimizer is optimizer:
                return watched
        owned = (self._guard.names.of(p) for p in _parameters_of(optimizer))
        if self._depth > 0 or not any(owned):
            return None
        number = len(self._watched) or ""
        self._watched.append(Watched(f"optimizer{number}", optimizer))
        self.recorder.note(
            f"{type(optimizer).__name__} was not given to enable: its state is recorded from its"
            " first step on"
        )
        return self._watched[-1]

    def _record_state(self, now: Snapshot, optimizer: Any) -> None:
        owned, masters = self._split(optimizer)
        now.tensors("master", "master", masters)
        by_slot: dict[str, list[tuple[str, Tensor]]] = {}
        others = []
        states = getattr(optimizer, "state", {})
        for name, parameter in owned + masters:
            for slot, value in _leaves(states.get(parameter)):
                if isinstance(value, Tensor):
                    by_slot.setdefault(slot, []).append((name, value))
                else:
                    others.append((name, slot, value))
        for slot, named in by_slot.items():
            now.tensors("optimizer_state", slot, named)
        for name, slot, value in others:
            now.value(name, "optimizer_state", slot, value)

    def _record_rounded(self, now: Snapshot, optimizer: Any) -> None:
        """Each master in its weight's dtype, slot `rounded`: what its weight should be.

        One after the other: no more than one copy is alive.
        """
        for name, master in self._split(optimizer)[1]:
            weight = self._guard.names.parameters.get(name)
            if weight is None or weight.shape != master.shape or weight.dtype == master.dtype:
                continue
            with _disable_current_modes():  # the copy is ours: no mode is to see it made
                rounded = master.detach().to(weight.dtype)
            now.tensors("master", "rounded", [(name, rounded)])

    def _record_groups(self, now: Snapshot, watched: Watched, *, membership: bool) -> None:
        for index, group in enumerate(getattr(watched.optimizer, "param_groups", ())):
            boundary = f"{watched.name}.group{index}"
            if membership:
                names = sorted(self.name_of(p) or "?" for p in group["params"])
                now.value(boundary, "scalar", "params", "\n".join(names))
            for key in sorted(group.keys() - {"params"}):
                for path, value in tensors_in(group[key], key):
                    if value is None:
                        continue
                    # 1 and 1.0 are the same setting.
                    plain = float(value) if type(value) is int else value
                    now.value(f"{boundary}.{path}", "scalar", "0", plain)

    def _split(self, optimizer: Any) -> tuple[list[NamedParameter], list[NamedParameter]]:
        """The optimizer's parameters in group order: (the model's own, masters)."""
        owned, masters = [], []
        for parameter in _parameters_of(optimizer):
            name = self._guard.names.of(parameter)
            if name is not None:
                owned.append((name, parameter))
            elif id(parameter) in self._masters:
                masters.append((self._masters[id(parameter)], parameter))
        return owned, masters

    def _name_masters(self) -> None:
        names = self._guard.names
        foreign: dict[int, Tensor] = {}
        owned: set[str] = set()
        for watched in self._watched:
            for parameter in _parameters_of(watched.optimizer):
                name = names.of(parameter)
                if name is None:
                    foreign[id(parameter)] = parameter
                else:
                    owned.add(name)
        self._masters = {}
        for name, parameter in names.parameters.items():
            master = getattr(parameter, "main_param", None)
            if id(master) in foreign:
                self._masters[id(master)] = name
                owned.add(name)
                del foreign[id(master)]
        if foreign:
            free = [(n, p) for n, p in names.parameters.items() if n not in owned]
            matched = match_masters(list(foreign.values()), free)
            self._masters |= dict(zip(foreign, matched, strict=True))


def match_masters(masters: Sequence[Tensor], parameters: Sequence[NamedParameter]) -> list[str]:
    """Name masters by the parameters of the same shapes in the same order, all or none.

    Where they cannot be told that way, they are numbered: "master0", "master1", ...
    """
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    shapes = [m.shape for m in masters]
    for candidates in (trainable, parameters):
        if [p.shape for _, p in candidates] == shapes:
            return [name for name, _ in candidates]
    return [f"master{i}" for i in range(len(masters))]


def _leaves(state: Any) -> list[tuple[str, Any]]:
    """(slot, tensor or value) of a parameter's state, however it is nested."""
    return [leaf for key, value in (state or {}).items() for leaf in tensors_in(value, str(key))]


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _innermost(optimizer: Any) -> Any:
    """The optimizer that a wrapper without hooks of its own passes its steps on to."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not hasattr(inner, "param_groups"):
            return optimizer
        optimizer = inner
    return optimizer


def _replace_step(probe: OptimizerProbe, optimizer: Any) -> Replacement:
    return Replacement(
        optimizer,
        "step",
        before=lambda *_a, **_k: probe._before_step(optimizer),
        after=lambda _result, *_a, **_k: probe._after_step(optimizer),
    )
