"""FullyShardedDataParallel (FSDP1): each rank keeps a stretch of all parameters, laid end to end.

In:  the models given to `enable`.
Out: which elements of each parameter a rank keeps, as placements over an axis `dp`.

With `use_orig_params=False` a rank has one flat tensor, a part of the whole with its padding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from upguard_plugin.capture.placements import STATE_ROLES, Placements, Slice
from upguard_plugin.records import Layout, Placement

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


def is_flat_sharded(models: nn.Module | Sequence[nn.Module]) -> bool:
    """Whether FSDP1 has cut them up; torch's module is not loaded for the answer."""
    return next(_parts(models), None) is not None


class FlatShards(Placements):
    """What FSDP1 has cut is a part on each rank, but for the time that a module uses it."""

    def __init__(self, rules: Mapping[str, Any] | None, layout: Layout, models: Any) -> None:
        """Raises as `Placements`."""
        super().__init__(rules, layout)
        self._parts = {id(parameter): part for parameter, part in _parts(models)}

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        number = id(self.parameters.get(boundary))
        if role not in STATE_ROLES or number not in self._parts:
            return super()._find(boundary, role, slot, shape)
        part = self._parts[number]
        if not shape and role != "optimizer_state":  # there is no gradient, as of no element
            return None
        if tuple(shape) == (part.end - part.start,):
            return self._of_slice(boundary, part, shape)
        return super()._find(boundary, role, slot, shape)


def _parts(
    models: nn.Module | Sequence[nn.Module],
) -> Iterator[tuple[torch.Tensor, Slice]]:
    """The parameters of which each rank keeps a part, with this rank's."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    for model in models if isinstance(models, (list, tuple)) else [models]:
        for wrapper in module.FullyShardedDataParallel.fsdp_modules(model):
            handle = getattr(wrapper, "_handle", None)
            if handle is None or not handle.uses_sharded_strategy:
                continue
            flat = handle.flat_param
            size = flat._sharded_size.numel()
            end = (handle.rank + 1) * size
            yield flat, Slice(end - size, end, (handle.world_size * size,))
            for parameter, kept, shape in zip(
                flat._params or (), flat._shard_param_infos, flat._shapes, strict=False
            ):
                start = kept.intra_param_start_idx if kept.in_shard else 0
                end = kept.intra_param_end_idx + 1 if kept.in_shard else 0
                yield parameter, Slice(start, end, tuple(shape))
