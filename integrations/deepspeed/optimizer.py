"""DeepSpeed's optimizers: reduced gradients, loss scale, norm, clip, updated parts, the gathering.

In:  an engine and the shards of this rank.
Out: phase `grad_sync`: the reduced gradients, of a ZeRO optimizer this rank's part; phase `clip`:
     found_inf, the norm, the clip coefficient; phase `optimizer`: the part of each weight that this
     rank has updated; phase `param_sync`: the weights once they are gathered. At `start` and after
     each step the loss scale.

The torch optimizer inside is watched by capture itself, which asks `Shards` whose stretches its
flat tensors hold.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.clipping import Replacement
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.integrations.deepspeed.shards import Shards

_EPSILON = 1e-6  # what DeepSpeed adds to the norm before it divides by it


class UpdateProbe:
    """Watches what an engine does at an accumulation boundary."""

    def __init__(self, guard: Guard, engine: Any, shards: Shards) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._engine = engine
        self._optimizer = engine.optimizer
        self._shards = shards
        self._norm_step = -1  # the step whose norm is recorded
        self._replacements: list[Replacement] = []

    def attach(self) -> None:
        """Replace methods of this engine and optimizer. `detach` puts them back."""
        engine_module = sys.modules[_defining(type(self._engine), "_take_model_step").__module__]
        own_module = sys.modules[type(self._optimizer).__module__]
        replace: list[tuple[Any, str, Any, Any]] = [
            (self._engine, "_take_model_step", self._before_update, self._after_update),
            (engine_module, "clip_grad_norm_", None, self._after_clip),
            (own_module, "all_gather_dp_groups", self._before_gather, self._after_gather),
            (self._optimizer, "_post_step", self._before_post_step, None),
        ]
        for owner, name, before, after in replace:
            if hasattr(owner, name):
                self._replacements.append(Replacement(owner, name, before, after))
        states = self._guard.states
        states.sources += [self._record_loss_scale, self._record_samples]
        states.optimizers.on_step = self._record_norm
        states.optimizers.masters.fragments_of = self._shards.fragments_of
        states.optimizers.groups_at_rest = self._shards.groups_at_rest
        if self._shards.is_stage3:
            states.at_rest = self._shards.at_rest

    def detach(self) -> None:
        """Leave DeepSpeed as it was."""
        while self._replacements:
            self._replacements.pop().remove()

    @shielded
    def _before_update(self, *_args: Any, **_kwargs: Any) -> None:
        position = self._guard.position
        if self.recorder.active:
            gradients = self._guard.states.gradients
            parts = self._shards.gradients()
            if parts:
                gradients.record_parts(parts, role="main_grad")
            else:
                gradients.record_complete(list(self._guard.names.parameters.items()))
            gradients.mark_complete()
        position.microbatch = position.backward_microbatch = -1
        position.phase = "clip"

    @shielded
    def _after_update(self, *_args: Any, **_kwargs: Any) -> None:
        if not self.recorder.active:
            return
        self._record_norm()
        if hasattr(self._optimizer, "overflow"):
            found = self._optimizer.overflow
            with Snapshot(self._guard, "clip") as now:
                now.value("found_inf", "scalar", "0", found)

    @shielded
    def _after_clip(self, norm: Any, *_args: Any, **_kwargs: Any) -> None:
        self._record_norm(norm)
        if self.recorder.active:
            parameters = list(self._guard.names.parameters.items())
            self._guard.states.gradients.record_complete(parameters, operator="clip_grad_norm_")

    @shielded
    def _record_norm(self, norm: Any = None) -> None:
        """Record the norm and the clip coefficient once a step, as soon as they are there."""
        norm = getattr(self._optimizer, "_global_grad_norm", None) if norm is None else norm
        step = self._guard.position.step
        if norm is None or self._norm_step == step or not self.recorder.active:
            return
        self._norm_step = step
        with Snapshot(self._guard, "clip") as now:
            now.value("grad_norm", "scalar", "0", norm)
            most = float(self._engine.gradient_clipping() or 0.0)
            if most > 0.0:
                now.value("clip_coefficient", "scalar", "0", _coefficient(norm, most))

    @shielded
    def _before_gather(self, *_args: Any, **_kwargs: Any) -> None:
        if self.recorder.active:
            with Snapshot(self._guard, "optimizer") as now:
                now.tensors("param", "value", self._shards.written())
        self._guard.position.phase = "param_sync"

    @shielded
    def _after_gather(self, *_args: Any, **_kwargs: Any) -> None:
        if self.recorder.active:
            names = self._guard.names.parameters
            gathered = [(name, names[name]) for name in names if names[name].requires_grad]
            with Snapshot(self._guard, "param_sync") as now:
                now.tensors("param", "value", gathered)
            self._guard.states.mark_recorded([name for name, _ in gathered])
        self._guard.position.phase = "optimizer"

    def _before_post_step(self, *_args: Any, **_kwargs: Any) -> None:
        self._guard.position.phase = "param_sync"  # ZeRO 3 gathers small weights at once

    def _record_loss_scale(self, now: Snapshot) -> None:
        scale = getattr(self._optimizer, "loss_scale", None)
        if scale is None:
            scale = getattr(self._optimizer, "cur_scale", None)
        if isinstance(scale, int | float | Tensor):
            now.value("loss_scale", "scalar", "0", scale)

    def _record_samples(self, now: Snapshot) -> None:
        """How far the engine has come: where the data loader of a resumed run goes on."""
        consumed = getattr(self._engine, "global_samples", None)
        if consumed is not None:
            now.value("global_samples", "scalar", "0", consumed)


def _coefficient(norm: Any, most: float) -> Any:
    """What DeepSpeed multiplies gradients with; of a tensor a tensor, so that nothing waits."""
    if not isinstance(norm, Tensor):
        return min(1.0, most / (float(norm) + _EPSILON))
    with torch.no_grad(), _disable_current_modes():
        return torch.reciprocal(torch.clamp((norm + _EPSILON) / most, min=1.0))


def _defining(cls: type, name: str) -> type:
    """The class of the hierarchy that has the function itself."""
    return next((base for base in cls.__mro__ if name in vars(base)), cls)
