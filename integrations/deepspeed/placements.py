"""Placements of a DeepSpeed job's tensors.

In:  the layout and the shards of this rank. Out: a tensor's `Placement`, or None: unknown.

What newcomers get wrong: one parameter has two shapes. Whole it is used by the model; its shard,
flattened, is what ZeRO keeps. A tensor that has the shard's size and no dims beside is the shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from upguard_plugin.capture.placements import STATE_ROLES, Placements
from upguard_plugin.integrations.deepspeed.shards import Shard
from upguard_plugin.placement import replicated, resolve_placement
from upguard_plugin.records import Layout, Placement

_ALWAYS_SHARDS = ("master", "optimizer_state")


class DeepSpeedPlacements(Placements):
    """Shards of ZeRO, and whole replicas of everything else that is state."""

    def __init__(
        self, layout: Layout, shards: Mapping[str, Shard], experts: frozenset[str]
    ) -> None:
        """experts: parameters that only the ranks of an expert-data-parallel group share."""
        super().__init__(None, layout)
        self._shards = shards
        self._experts = experts
        tensor = layout.axis("tp")
        self._splits_unknown = tensor is not None and tensor.size > 1
        self._has_expert_mesh = layout.axis("edp", "expert") is not None

    def unreduced(self, boundary: str) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is a partial sum while it is accumulated."""
        return ("edp",) if boundary in self._experts else ("dp", "cp")

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        if role not in STATE_ROLES:
            return None
        is_expert = boundary in self._experts
        if self._splits_unknown or (is_expert and not self._has_expert_mesh):
            return None  # which part this is of the parameter of all ranks nobody has said
        shard = self._shards.get(boundary)
        if shard is not None and _is_shard(role, shape, shard):
            return self._slice(shard, shape)
        return replicated(shape, "expert" if is_expert else "dense")

    def _slice(self, shard: Shard, shape: torch.Size) -> Placement:
        splits = [f"{'edp' if shard.is_expert else 'dp'}@{shard.start}:{shard.end}"]
        sequence = self._layout.axis("cp")
        if sequence is not None and sequence.size > 1 and not shard.is_expert:
            splits.append(f"cp@0:{shard.size}")
        spec = f"* | flat[{','.join(splits)}]{' @expert' if shard.is_expert else ''}"
        return resolve_placement(spec, tuple(shape), self._layout, whole_shape=shard.whole_shape)


def _is_shard(role: str, shape: torch.Size, shard: Shard) -> bool:
    if tuple(shape) != (shard.size,):
        return False
    return role in _ALWAYS_SHARDS or tuple(shape) != shard.whole_shape
