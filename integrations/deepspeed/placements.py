"""Placements of a DeepSpeed job's tensors.

In:  the layout, the shards of this rank, and which parts of the parameters they are shards of.
Out: a tensor's `Placement`, or None: unknown.

What newcomers get wrong: one parameter has two shapes. Whole (as tensor parallelism left it) it is
used by the model; its shard, flattened, is what ZeRO keeps. A tensor that has the shard's size and
no dims beside is the shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from upguard_plugin.capture.placements import STATE_ROLES, Placements
from upguard_plugin.errors import PlacementError
from upguard_plugin.integrations.deepspeed.shards import Shard
from upguard_plugin.placement import replicated, resolve_placement
from upguard_plugin.records import Layout, Placement

_ALWAYS_SHARDS = ("master", "optimizer_state")


class DeepSpeedPlacements(Placements):
    """Shards of ZeRO, parts of tensor parallelism, and whole replicas of all other state."""

    def __init__(
        self,
        layout: Layout,
        shards: Mapping[str, Shard],
        specs: Mapping[str, str | None],
        zero_axes: tuple[str, ...],
    ) -> None:
        """specs: of `parameter_specs`. zero_axes: those over which ZeRO cuts dense parameters."""
        super().__init__(None, layout)
        self._shards = shards
        self._specs = specs
        self._zero_axes = zero_axes
        tensor = layout.axis("tp")
        self._has_splits = tensor is not None and tensor.size > 1

    def unreduced(self, boundary: str) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is a partial sum while it is accumulated."""
        return ("edp",) if "@expert" in (self._specs.get(boundary) or "") else ("dp", "cp")

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        if role not in STATE_ROLES or (self._has_splits and role == "buffer"):
            return None
        spec = self._specs.get(boundary, "*")
        if spec is None:
            return None  # which part this is of the parameter of all ranks nobody has said
        try:
            shard = self._shards.get(boundary)
            if shard is not None and _is_shard(role, shape, shard):
                return self._slice(spec, shard, shape)
            if spec.startswith("*") or not shape:  # an optimizer's step counter has no dims
                return replicated(shape, "expert" if "@expert" in spec else "dense")
            return resolve_placement(spec, tuple(shape), self._layout)
        except PlacementError:
            return None  # the marks are not true of this tensor

    def _slice(self, spec: str, shard: Shard, shape: torch.Size) -> Placement:
        first, *others = ("edp",) if shard.is_expert else self._zero_axes
        splits = [f"{first}@{shard.start}:{shard.end}"]
        splits += [f"{axis}@0:{shard.size}" for axis in others]
        plain, _, mesh = spec.partition(" @")
        flat = f"{plain} | flat[{','.join(splits)}]{f' @{mesh}' if mesh else ''}"
        return resolve_placement(flat, tuple(shape), self._layout, whole_shape=shard.whole_shape)


def _is_shard(role: str, shape: torch.Size, shard: Shard) -> bool:
    if tuple(shape) != (shard.size,):
        return False
    return role in _ALWAYS_SHARDS or tuple(shape) != shard.whole_shape
