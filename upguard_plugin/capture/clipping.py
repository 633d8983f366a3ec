"""Unscale, norm and clip: torch's own functions for it, watched while they run.

In:  calls of `clip_grad_norm_`, `clip_grad_value_` and of `torch.amp.GradScaler`.
Out: phase `clip`: the total norm, and the gradients after each of these steps; the loss scale.
     The position is in that phase while they run.

The functions inside `clip_grad_norm_` are replaced, not the function itself: programs that have
imported it by name are seen too. Hand-written clipping shows in the gradients before the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad

from upguard_plugin.capture.gradients import GradientProbe, NamedParameter
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot

Name = Callable[[Tensor], str | None]


class Replacement:
    """A function of another module or object with a call before and a call after it."""

    def __init__(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """before(*args, **kwargs); after(result, *args, **kwargs). They must not raise."""
        original = getattr(owner, name)
        self._owner, self._name = owner, name
        self._inherited = name not in vars(owner)
        self._original = original
        self._live = True

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None and self._live:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None and self._live:
                after(result, *args, **kwargs)
            return result

        self._call = call
        setattr(owner, name, call)

    def remove(self) -> None:
        """Put the original back; where somebody wrapped ours meanwhile, only pass calls on."""
        self._live = False
        if vars(self._owner).get(self._name) is not self._call:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


class ClippingProbe:
    """Watches what happens to complete gradients before the optimizer uses them."""

    def __init__(self, guard: Host, gradients: GradientProbe, name_of: Name) -> None:
        """name_of: the boundary of a parameter or master; None: not of this run."""
        self.recorder = guard.recorder
        self._guard = guard
        self._gradients = gradients
        self._name_of = name_of
        self._scalers: list[weakref.ref[GradScaler]] = []
        self._phase_around = ""  # of the function that runs
        self._replacements: list[Replacement] = []

    def attach(self) -> None:
        """Replace the functions. `detach` puts them back."""
        replace: list[tuple[Any, str, Any, Any]] = [
            (clip_grad, "_get_total_norm", self._before_norm, self._after_norm),
            (clip_grad, "_clip_grads_with_norm_", self._enter, self._after_clip),
            # `clip_grad_value_` calls this first; what it leaves shows before the optimizer's step.
            (clip_grad, "_group_tensors_by_device_and_dtype", self._before_any, None),
            (GradScaler, "scale", self._before_scale, None),
            (GradScaler, "unscale_", self._before_unscale, self._after_unscale),
        ]
        for owner, name, before, after in replace:
            self._replacements.append(Replacement(owner, name, before, after))

    def detach(self) -> None:
        """Leave torch's functions as they were."""
        while self._replacements:
            self._replacements.pop().remove()

    def record_start(self, now: Snapshot) -> None:
        """Record the loss scale of every scaler that has been used."""
        for ref in self._scalers:
            scaler = ref()
            if scaler is not None:
                _record_scaler(now, scaler)

    @shielded
    def _enter(self, *_args: Any, **_kwargs: Any) -> None:
        self._phase_around, self._guard.position.phase = self._guard.position.phase, "clip"

    def _leave(self) -> None:
        self._guard.position.phase = self._phase_around

    @shielded
    def _before_norm(self, *_args: Any, **_kwargs: Any) -> None:
        self._enter()
        self._before_any()

    @shielded
    def _before_any(self, *_args: Any, **_kwargs: Any) -> None:
        # It is about gradients; whose they are shows after it, in `_after_clip`.
        if self.recorder.active and not self._gradients.complete:
            self._gradients.record_complete(list(self._guard.names.parameters.items()))
            self._gradients.mark_complete()

    @shielded
    def _after_norm(self, norm: Any, *_args: Any, **_kwargs: Any) -> None:
        self._leave()
        if self.recorder.active and isinstance(norm, Tensor):
            call = self._guard.position.next_call("grad_norm")
            with Snapshot(self._guard, "clip", call=call, operator="clip_grad_norm_") as now:
                now.value("grad_norm", "scalar", "0", norm)

    @shielded
    def _after_clip(self, _result: None, parameters: Any, *_args: Any, **_kwargs: Any) -> None:
        self._leave()
        self._record_after(parameters, "clip_grad_norm_")

    @shielded
    def _before_scale(self, scaler: GradScaler, *_args: Any, **_kwargs: Any) -> None:
        if not scaler.is_enabled() or any(ref() is scaler for ref in self._scalers):
            return
        self._scalers.append(weakref.ref(scaler))
        if self.recorder.active:
            # Seen for the first time, but it has not changed since the step began.
            with Snapshot(self._guard, "start") as now:
                _record_scaler(now, scaler)

    @shielded
    def _before_unscale(self, scaler: GradScaler, optimizer: Any) -> None:
        self._enter()
        if self.recorder.active and scaler.is_enabled():
            self._gradients.record_complete(self._named(_parameters_of(optimizer)))
            self._gradients.mark_complete()

    @shielded
    def _after_unscale(self, _result: None, scaler: GradScaler, optimizer: Any) -> None:
        self._leave()
        if scaler.is_enabled():
            self._record_after(_parameters_of(optimizer), "unscale_")

    def _record_after(self, parameters: Tensor | Iterable[Tensor], operator: str) -> None:
        if not self.recorder.active:
            return
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        named = self._named(found)
        if named:
            self._gradients.record_complete(named, operator=operator)

    def _named(self, parameters: Iterable[Tensor]) -> list[NamedParameter]:
        named = [(self._name_of(parameter), parameter) for parameter in parameters]
        return [(name, parameter) for name, parameter in named if name is not None]


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _record_scaler(now: Snapshot, scaler: GradScaler) -> None:
    # Read from the state itself: `get_scale()` would wait for the device.
    scale = getattr(scaler, "_scale", None)
    growth = getattr(scaler, "_growth_tracker", None)
    now.value("loss_scale", "scalar", "0", scaler._init_scale if scale is None else scale)
    now.value(
        "loss_scale", "scalar", "growth", scaler._init_growth_tracker if growth is None else growth
    )
