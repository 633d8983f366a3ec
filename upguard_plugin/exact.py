"""Exact arithmetic: a model whose sums have the same bits in any order, whole or cut into parts.

In:  a model, or this rank's part of one; its batches; its optimizer.
Out: the same model with weights from {-1, -1/2, 0, 1/2, 1} and without operations that round.

    make_exact(model, layout=..., placements=...)     # before `enable`, with its arguments
    batch = exact_data(batch)
    keep_exact(optimizer)

Small dyadic numbers add up without a rounding, so that the order of a sum, over the ranks of any
layout, does not show. Two layouts of the model must then agree bit for bit, and what differs is a
bug of the layout. `watch_exact` tells whether the numbers were small enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from upguard_plugin.capture.models import named_models
from upguard_plugin.capture.names import ParameterNames, Rename
from upguard_plugin.capture.placements import Placements, layout_of
from upguard_plugin.errors import PlacementError, UpGuardError
from upguard_plugin.exact_functions import exact_functions
from upguard_plugin.fingerprint.dtensors import placement_of
from upguard_plugin.records import Layout, Placement

__all__ = [
    "ExactnessError",
    "bit_width",
    "exact_data",
    "exact_functions",
    "exact_values",
    "keep_exact",
    "make_exact",
    "watch_exact",
]

_SAMPLES_ONLY = ("dp", "edp", "pp", "vpp")  # axes that cut no single parameter
_SPARE_BITS = 3  # partial sums may be larger than what they add up to
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class ExactnessError(UpGuardError):
    """Values have so many bits that a sum of them may have been rounded."""


def make_exact(
    model: nn.Module | Sequence[nn.Module],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layout: Layout | Mapping[str, Any] | None = None,
    placements: Mapping[str, Any] | None = None,
    tied: Sequence[Sequence[str]] | None = None,
    rename: Rename | None = None,
    twins: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> None:
    """Turn a model, or this rank's part of one, into an exact one, in place.

    Every parameter gets values that depend on its name and on where an element lies in the logical
    tensor, so that all layouts of a model get the same ones; floating buffers are rounded. In the
    forward of each module, functions that round are replaced by exact twins.

    dtype: float64, or float32 for shallow models. layout, placements, tied, rename: as for
    `upguard_plugin.enable`. twins: further functions that round, with their twins.
    Raises PlacementError for a parameter whose part of the logical tensor is not known.
    """
    place = layout_of(layout, *_rank_and_size())
    rules = Placements(placements, place)
    models = named_models(model)
    for _, part in models:
        part.to(dtype)
    names = ParameterNames(models, tied, whole=False, rename=rename)
    first_name = {name: group[0] for group in tied or () for name in group}
    with torch.no_grad():
        for name, parameter in names.parameters.items():
            held = _placement(name, parameter, rules, place)
            local = getattr(parameter, "_local_tensor", parameter)
            drawn_as = first_name.get(name, name)
            local.copy_(exact_values(drawn_as, local.shape, seed=seed, placement=held))
        for buffer in names.buffers.values():
            if buffer.is_floating_point():
                buffer.copy_(_rounded(buffer))
    for _, part in models:
        for module in part.modules():
            _use_twins(module, twins)


def exact_values(
    name: str,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    placement: Placement | None = None,
) -> Tensor:
    """Values from {-1, -1/2, 0, 1/2, 1}, drawn by name and by place in the logical tensor.

    shape: of the result, this rank's. placement: which part of a logical tensor that is; None: the
    whole. Elements outside of the logical tensor (padding) are 0. On the CPU.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, np.uint64)
    flat = np.zeros(int(np.prod(shape, dtype=np.int64)))
    if placement is None:
        flat[:] = _drawn(key, np.arange(len(flat)))
    for piece in placement.pieces if placement is not None else ():
        held, logical = np.array(piece.local_start), np.array(piece.logical_start)
        steps = zip(piece.sizes, piece.local_strides, piece.logical_strides, strict=True)
        for count, local_step, logical_step in steps:
            along = np.arange(count)
            held = held[..., None] + along * local_step
            logical = logical[..., None] + along * logical_step
        flat[held] = _drawn(key, logical)
    return torch.from_numpy(flat).to(dtype).view(tuple(shape))


def exact_data(batch: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A batch, tensor or nested structure, whose floating values are multiples of 1/2 in [-1, 1].

    Each element is rounded by itself: parts of a batch become parts of the exact batch.
    """

    def exact(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return _rounded(leaf).to(dtype) if floating else leaf

    return tree_map(exact, batch)


def keep_exact(optimizer: torch.optim.Optimizer) -> Any:
    """Round the weights to multiples of 1/2 in [-1, 1] after every step of an optimizer.

    Without it the first update makes the weights as wide as the gradients. Updates of less than
    1/4 leave a weight as it is: use a large learning rate. Returns a handle with `remove()`.
    """

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    local = getattr(parameter, "_local_tensor", parameter)
                    local.copy_(_rounded(local))

    return optimizer.register_step_post_hook(after)


def bit_width(tensor: Tensor) -> int:
    """How many bits an integer needs so that every element is such an integer times one unit.

    Sums of so many bits and fewer than the dtype's have no rounding. Waits for the device.
    """
    values = tensor.detach().double().abs()
    if not bool(values.isfinite().all()):
        return 1 << 30
    values = values[values > 0]
    if not len(values):
        return 0
    mantissa, exponent = torch.frexp(values)
    digits = (mantissa * 2.0**53).long()
    lowest = torch.frexp((digits & -digits).double())[1] + exponent - 54
    return int(exponent.max() - lowest.min())


@dataclass(slots=True)
class Widest:
    """The widest tensor seen so far."""

    bits: int = 0
    limit: int = 0  # how many there may be
    what: str = ""  # where

    def look(self, what: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        bits = bit_width(tensor)
        limit = 1 - round(float(np.log2(torch.finfo(tensor.dtype).eps))) - _SPARE_BITS
        if bits - limit > self.bits - self.limit or not self.what:
            self.bits, self.limit, self.what = bits, limit, what

    def look_at_gradient(self, name: str, parameter: Tensor) -> None:
        self.look(f"gradient of {name}", parameter.grad)


@contextmanager
def watch_exact(model: nn.Module) -> Iterator[Widest]:
    """A `with` block that measures all outputs, their gradients and those of the parameters.

    Raises ExactnessError at its end, with the widest of them, if sums may have been rounded. For a
    first try of a model, not for a recorded run: it waits for the device at every module.
    """
    widest = Widest()
    handles: list[Any] = []

    def outputs(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                widest.look(f"output of {name}", leaf)
                if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                    continue
                look = partial(widest.look, f"gradient of {name}'s output")
                leaf.register_hook(look)  # type: ignore[no-untyped-call]

        return after

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(outputs(name or "the model")))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            look = partial(widest.look_at_gradient, name)
            handles.append(parameter.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]
    try:
        yield widest
    finally:
        while handles:
            handles.pop().remove()
    if widest.bits > widest.limit:
        raise ExactnessError(
            "the model is not exact: sums of its values may have been rounded",
            evidence={"widest": widest.what, "bits": widest.bits, "at most": widest.limit},
            remedy="make_exact(..., twins={function: exact twin}), fewer steps, or float64",
        )


def _rank_and_size() -> tuple[int, int]:
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return 0, 1


def _placement(name: str, parameter: Tensor, rules: Placements, layout: Layout) -> Placement | None:
    own = placement_of(parameter) or rules.of(name, "param", "value", parameter.shape)
    cuts = [a.name for a in layout.axes if a.size > 1 and a.name not in _SAMPLES_ONLY]
    if own is None and cuts:
        raise PlacementError(
            f"cannot make {name} exact: which part of it this rank holds is not known",
            evidence={"shape": list(parameter.shape), "axes": ", ".join(cuts)},
            remedy=f"say it: placements={{{name!r}: '* o[{cuts[0]}]'}}, or '*' for all of it",
        )
    return own


def _use_twins(
    module: nn.Module, twins: Mapping[Callable[..., Any], Callable[..., Any]] | None
) -> None:
    """Let the module's forward use exact twins, also when it is called in a recomputation."""
    forward = module.forward

    @wraps(forward)
    def exact_forward(*args: Any, **kwargs: Any) -> Any:
        with exact_functions(twins):
            return forward(*args, **kwargs)

    module.forward = exact_forward


def _drawn(key: Any, index: Any) -> Any:
    """Values from {-1, -1/2, 0, 1/2, 1} for the elements of these numbers."""
    z = key + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z >> np.uint64(33)) % np.uint64(5)).astype(np.float64) / 2 - 1


def _rounded(x: Tensor) -> Tensor:
    return x.mul(2).round().div(2).clamp(-1, 1)
