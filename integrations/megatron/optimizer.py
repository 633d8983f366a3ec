"""Megatron's optimizers: final gradients, loss scale, norm, clip, masters, skipped steps.

In:  a MegatronOptimizer, chained or not, distributed or not, and the names of the parameters.
Out: phase `grad_sync`: `main_grad`, of a distributed optimizer this rank's slice of it; phase
     `clip`: found_inf, gradients after unscaling, the norm; phase `param_sync` around the
     gathering of weights; at `start` and after each step the loss scale. A step that Megatron
     skips is marked.

The torch optimizer inside is watched by capture itself, which asks here for the names of masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from upguard_plugin.capture.clipping import Replacement
from upguard_plugin.capture.gradients import NamedParameter
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.integrations.megatron.placements import Shard

_EPSILON = 1e-6  # what Megatron adds to the norm before it divides by it


def chained(optimizer: Any) -> list[Any]:
    """The optimizers inside, in order; those that have no parameters on this rank are left out."""
    found = getattr(optimizer, "chained_optimizers", None)
    optimizers = [optimizer] if found is None else list(found)
    return [o for o in optimizers if not getattr(o, "is_stub_optimizer", False)]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers that do the steps."""
    return [o.optimizer for o in chained(optimizer) if getattr(o, "optimizer", None) is not None]


def is_distributed(optimizer: Any) -> bool:
    """Whether each replica keeps a part of masters and states only."""
    return hasattr(optimizer, "model_param_gbuf_map")


def masters_of(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(slice that the torch optimizer updates, model parameter) of a distributed optimizer."""
    pairs = (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_float16_groups", "shard_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    )
    for models, shards in pairs:
        for model_group, shard_group in zip(
            getattr(optimizer, models, ()), getattr(optimizer, shards, ()), strict=False
        ):
            for parameter, shard in zip(model_group, shard_group, strict=False):
                if shard is not None:
                    yield shard, parameter


def find_shards(optimizer: Any, names: ParameterNames) -> dict[str, Shard]:
    """The slice of each parameter that this rank updates, by the parameter's name."""
    shards: dict[str, Shard] = {}
    for each in filter(is_distributed, chained(optimizer)):
        for parameter, (buffer, dtype, bucket) in each.model_param_gbuf_map.items():
            slices = each.gbuf_ranges[buffer][dtype][bucket]["param_map"]
            name = names.of(parameter)
            if name is not None and parameter in slices:
                place = slices[parameter]["param"]
                shards[name] = Shard(place.start, place.end, tuple(parameter.shape))
    return shards


class MegatronOptimizerProbe:
    """Watches one optimizer and the gradients it is about to use."""

    def __init__(
        self,
        guard: Guard,
        optimizer: Any,
        chunks: list[Any],
        shards: dict[str, Shard],
    ) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._optimizer = optimizer
        self._chunks = chunks
        self._shards = shards
        self._inner = chained(optimizer)
        self._is_distributed = any(map(is_distributed, self._inner))
        self._final = -1  # the step whose final gradients are recorded
        self._places: list[AbstractContextManager[None]] = []  # of calls that have begun
        self._replacements: list[Replacement] = []

    def attach(self) -> None:
        """Replace methods of this optimizer and of its buckets. `detach` puts them back."""
        replace = [
            (self._optimizer, "step", self._before_step, self._after_step),
            (self._optimizer, "get_grad_norm", None, self._after_norm),
            (self._optimizer, "clip_grad_norm", None, self._after_norm),
        ]
        replace += [(o, "prepare_grads", None, self._after_prepare(o)) for o in self._inner]
        for chunk in self._chunks:
            if getattr(chunk, "use_forward_hook", False):
                put_first = partial(_put_gathering_first, chunk)
                replace.append((chunk, "enable_forward_pre_hook", None, put_first))
            groups = [*getattr(chunk, "bucket_groups", ())]
            groups += getattr(chunk, "expert_parallel_bucket_groups", ())
            replace += [
                (g, "start_param_sync", self._before_param_sync, self._after_param_sync)
                for g in groups
            ]
        for owner, name, before, after in replace:
            if hasattr(owner, name):
                self._replacements.append(Replacement(owner, name, before, after))
        states = self._guard.states
        states.sources.append(self._record_loss_scale)
        states.optimizers.masters.known = self._known_masters
        states.gradients.main_grads_at_rest = self._own_gradients
        if any(_gathers_late(chunk) for chunk in self._chunks):
            states.at_rest = self._at_rest

    def detach(self) -> None:
        """Leave Megatron as it was."""
        while self._replacements:
            self._replacements.pop().remove()

    @shielded
    def record_final_gradients(self) -> None:
        """Record every gradient after the last collective on it, before unscaling and clipping."""
        position = self._guard.position
        if self._final == position.step or not self.recorder.active:
            return
        self._final = position.step
        with Snapshot(self._guard, "grad_sync") as now:
            own = self._own_gradients(list(self._guard.names.parameters.items()))
            now.tensors("main_grad", "main_grad", own)
        self._guard.states.gradients.mark_complete()

    def _own_gradients(self, parameters: Sequence[NamedParameter]) -> list[tuple[str, Tensor]]:
        """What this rank has of the gradients once they are reduced: all, or its slices."""
        found = []
        for name, parameter in parameters:
            grad, shard = getattr(parameter, "main_grad", None), self._shards.get(name)
            if not isinstance(grad, Tensor):
                continue
            if not self._is_distributed:
                found.append((name, grad))
            elif shard is not None:  # the rest of it was not reduced to this rank
                found.append((name, grad.view(-1)[shard.start : shard.end]))
        return found

    def _before_step(self, *_args: Any, **_kwargs: Any) -> None:
        self.record_final_gradients()
        # What comes now, until the torch optimizer steps, is unscaling, norm and clipping.
        self._enter(self._guard.position.outside_microbatches("clip"))

    @shielded
    def _after_step(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        self._leave()
        self._guard.position.phase = "optimizer"  # until the step ends
        if isinstance(result, tuple) and result and result[0] is False:
            self._guard.mark = "skipped"

    @shielded
    def _after_norm(self, norm: Any, *_args: Any, **_kwargs: Any) -> None:
        if norm is None or not self.recorder.active:
            return
        call = self._guard.position.next_call("grad_norm")
        with Snapshot(self._guard, "clip", call=call) as now:
            now.value("grad_norm", "scalar", "0", norm)
            most = getattr(getattr(self._optimizer, "config", None), "clip_grad", 0.0)
            if most > 0.0 and not isinstance(norm, Tensor):
                now.value("clip_coefficient", "scalar", "0", min(1.0, most / (norm + _EPSILON)))

    def _after_prepare(self, optimizer: Any) -> Any:
        return lambda found, *_args, **_kwargs: self._record_prepared(optimizer, found)

    @shielded
    def _record_prepared(self, optimizer: Any, found_inf: Any) -> None:
        if getattr(optimizer, "grad_scaler", None) is None or not self.recorder.active:
            return
        position = self._guard.position
        with Snapshot(self._guard, "clip", call=position.next_call("found_inf")) as now:
            now.value("found_inf", "scalar", "0", bool(found_inf))
        name_of = self._guard.states.optimizers.masters.name_of
        named = [(name_of(p), p) for p in optimizer.get_parameters()]
        self._guard.states.gradients.record_complete(
            [(name, p) for name, p in named if name is not None],
            role="main_grad",
            operator="unscale",
        )

    def _before_param_sync(self, *_args: Any, **_kwargs: Any) -> None:
        self._enter(self._guard.position.in_phase("param_sync"))

    def _after_param_sync(self, *_args: Any, **_kwargs: Any) -> None:
        self._leave()

    def _enter(self, place: AbstractContextManager[None]) -> None:
        place.__enter__()
        self._places.append(place)

    def _leave(self) -> None:
        if self._places:
            self._places.pop().__exit__(None, None, None)

    def _record_loss_scale(self, now: Snapshot) -> None:
        for number, optimizer in enumerate(self._inner):
            scaler = getattr(optimizer, "grad_scaler", None)
            if scaler is None:
                continue
            boundary = "loss_scale" if number == 0 else f"loss_scale{number}"
            now.value(boundary, "scalar", "0", scaler.scale)
            for slot in ("growth_tracker", "hysteresis_tracker"):
                tracker = getattr(scaler, f"_{slot}", None)
                if tracker is not None:
                    now.value(boundary, "scalar", slot, tracker)

    def _known_masters(self) -> dict[int, str]:
        """Names of the slices that torch optimizers update, by the slice's identity."""
        names = self._guard.names
        return {
            id(shard): name
            for optimizer in filter(is_distributed, self._inner)
            for shard, parameter in masters_of(optimizer)
            if (name := names.of(parameter)) is not None
        }

    def _at_rest(self, name: str, parameter: Tensor) -> Tensor | None:
        """What is valid of a parameter between steps: its slice, until it is gathered."""
        if not parameter.requires_grad:
            return parameter
        shard = self._shards.get(name)
        return None if shard is None else parameter.detach().view(-1)[shard.start : shard.end]


def _put_gathering_first(chunk: Any, *_args: Any, **_kwargs: Any) -> None:
    """Have Megatron's own hooks, which wait until a weight is gathered, run before ours.

    Megatron-LM takes them off for the first step and hangs them on again.
    """
    for module, handle in chunk.remove_forward_pre_hook_handles.items():
        module._forward_pre_hooks.move_to_end(handle.id, last=False)


def _gathers_late(chunk: Any) -> bool:
    """Whether weights are gathered during the next forward only, bucket by bucket."""
    config = getattr(chunk, "ddp_config", None)
    distributed = getattr(config, "use_distributed_optimizer", False)
    return bool(distributed and getattr(config, "overlap_param_gather", False))
