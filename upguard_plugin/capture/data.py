"""Batches: what the training was fed, whole and sample by sample.

In:  batches given to `guard.data`, or else the tensors that enter a model's forward.
Out: phase `data`: one `data` event per tensor, and one `sample` event per sample of it, in batch
     order, fingerprinted as if the sample stood alone: runs with other micro-batches match by it.

A tensor that requires a gradient is not a batch: it was computed by the training itself.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from upguard_plugin.capture.names import WRAPPERS, is_wrapper
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import Hook, out_of_sight, shielded
from upguard_plugin.capture.snapshot import readable
from upguard_plugin.capture.tensors import tensors_in


class DataProbe:
    """Records batches. An adapter whose models receive activations sets `from_inputs` to False."""

    def __init__(self, guard: Host) -> None:
        self.recorder = guard.recorder
        self.from_inputs = True
        self.num_samples: int | None = None  # of the last batch; None where none was seen
        self._guard = guard
        self._given: tuple[int, int] | None = None  # (step, micro-batch) of the last `guard.data`
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Hook into the models' forward. `detach` undoes it."""
        for prefix, model in self._guard.models:
            names = argument_names(model)
            on_forward = Hook(self._on_forward, prefix, names)
            self._handles.append(
                model.register_forward_pre_hook(on_forward, prepend=True, with_kwargs=True)
            )

    def detach(self) -> None:
        """Leave the models as they were."""
        while self._handles:
            self._handles.pop().remove()

    def record(self, name: str, value: Any, batch_dim: int = 0) -> None:
        """Record a batch: a tensor, array, number or string, or a nested structure of them.

        batch_dim: the dim that counts samples; tensors of another size there have no samples.
        """
        position = self._guard.position
        self._given = (position.step, position.microbatch)
        self._record_leaves(tensors_in(value, name), batch_dim, "data")

    @shielded
    def _on_forward(
        self, prefix: str, names: tuple[str, ...], model: nn.Module, args: Any, kwargs: Any
    ) -> None:
        # No return value: anything but None would replace the model's arguments.
        position = self._guard.position
        given = self._given == (position.step, position.microbatch)
        if given or not self.from_inputs or not self.recorder.active:
            return
        if out_of_sight(self.recorder):
            return
        self._guard.begin_step_if_needed()
        named = {
            (names[i] if i < len(names) else f"args.{i}"): value for i, value in enumerate(args)
        }
        found = [
            (self._guard.names.rename(prefix + path), leaf)
            for name, argument in (named | kwargs).items()
            for path, leaf in tensors_in(argument, name)
            if isinstance(leaf, Tensor | np.ndarray)
        ]
        found = [(n, leaf) for n, leaf in found if not getattr(leaf, "requires_grad", False)]
        evaluates = not model.training or not torch.is_grad_enabled()
        self._record_leaves(found, 0, "eval" if evaluates else "data")

    def _record_leaves(self, found: list[tuple[str, Any]], batch_dim: int, phase: str) -> None:
        nested = [name for name, leaf in found if isinstance(leaf, Tensor) and leaf.is_nested]
        for boundary in nested:
            self.recorder.note(f"{boundary}: its batch is a nested tensor and is not seen")
        found = [(name, _as_tensor(leaf)) for name, leaf in found if name not in nested]
        num_samples = _num_samples([t for _, t in found if isinstance(t, Tensor)], batch_dim)
        self.num_samples = num_samples
        for boundary, leaf in found:
            call = self._guard.position.next_call(boundary)
            if isinstance(leaf, Tensor):
                has_samples = leaf.dim() > batch_dim and leaf.shape[batch_dim] == num_samples
                self._record_tensor(boundary, leaf, phase, call, batch_dim if has_samples else None)
            elif leaf is not None:
                self.recorder.record_value(boundary, leaf, role="data", phase=phase, call=call)

    def _record_tensor(
        self, boundary: str, batch: Tensor, phase: str, call: int, batch_dim: int | None
    ) -> None:
        tensor = readable(batch)
        placement = self._guard.placement(boundary, "data", "0", tensor)
        self.recorder.record(
            boundary, tensor, role="data", phase=phase, call=call, placement=placement
        )
        if batch_dim is None:
            return
        plain = type(tensor) is Tensor
        with torch._C._DisableTorchDispatch() if plain else nullcontext():  # for no mode to see
            samples = tensor.detach().unbind(batch_dim)
        # A rank may hold a part of each sample: what all of them hold tells the sample.
        cut = self._guard.placements.of_samples(boundary, "data", "0", tensor.shape)
        held = None if cut is None or cut[0] != batch_dim else cut[1]
        for i, sample in enumerate(samples):
            self.recorder.record(
                boundary, sample, role="sample", slot=str(i), phase=phase, call=call, placement=held
            )  # fmt: skip


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of the forward of the model inside all wrappers."""
    while is_wrapper(model):
        model = next(m for name, m in model._modules.items() if name in WRAPPERS and m is not None)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _as_tensor(leaf: Any) -> Any:
    """Arrays as tensors that share their memory; anything else as it is."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    return leaf


def _num_samples(tensors: list[Tensor], batch_dim: int) -> int | None:
    """How many samples the batch has: as its first tensor of two dims or more says, else any."""
    sized = [t for t in tensors if t.dim() > batch_dim]
    best = next((t for t in sized if t.dim() > 1), sized[0] if sized else None)
    return None if best is None else best.shape[batch_dim]
