"""`enable` as users call it: the core's guard, with the probes that PyTorch's own parts need.

In:  models and optimizers, as for the core's `enable`.
Out: a Guard. Adapters of frameworks with wrappers of their own call the core's, and add theirs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from upguard_plugin.capture import enable as core
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.names import Rename
from upguard_plugin.capture.placements import Placements, layout_of
from upguard_plugin.capture.probe import Probe
from upguard_plugin.capture.run import find_rank
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.integrations.torch_native.checkpoints import DistributedCheckpoints
from upguard_plugin.integrations.torch_native.flat_shards import FlatShards, is_flat_sharded
from upguard_plugin.integrations.torch_native.reducer import ReducerBuckets
from upguard_plugin.integrations.torch_native.uneven import UnevenInputs
from upguard_plugin.integrations.torch_native.zero_redundancy import (
    DividedPlacements,
    ZeroRedundancyProbe,
    is_zero_redundancy,
)
from upguard_plugin.records import Layout


def enable(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Sequence[Any] | Any = None,
    config: UpGuardConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    *,
    layout: Layout | Mapping[str, Any] | None = None,
    placements: Placements | Mapping[str, Any] | None = None,
    tied: Sequence[Sequence[str]] | None = None,
    rename: Rename | None = None,
) -> Guard:
    """Begin to record this process; call it when the models are on their devices and wrapped.

    model, optimizer: one, or a list (pipeline chunks, several models). config: settings, or the
    path of a file with them. layout: per axis a ProcessGroup or a size. placements: boundary name
    or glob -> spec. tied: lists of names of one parameter. rename: from a name in these models to
    the one in the whole model, where they are parts of it.
    Raises ConfigError for a wrong setting and RunDirectoryError for a directory that cannot be
    used. Returns a guard that does nothing where recording is off for this rank.
    """
    divided, is_cut = _divided(optimizer), is_flat_sharded(model)
    if (divided is not None or is_cut) and not isinstance(placements, Placements):
        layout = layout_of(layout, *find_rank())
        placements = (
            FlatShards(placements, layout, model)
            if is_cut
            else DividedPlacements(placements, layout, divided)
        )
    guard = core.enable(
        model, optimizer, config, layout=layout, placements=placements, tied=tied, rename=rename
    )
    if guard.probes:
        for probe in _probes(guard):
            guard.probes.append(probe)
            probe.attach()
        _name_buckets(guard)
    return guard


def _probes(guard: Guard) -> list[Probe]:
    probes: list[Probe] = [DistributedCheckpoints(), UnevenInputs(guard)]
    if _divided(guard.optimizers) is not None:
        probes.append(ZeroRedundancyProbe(guard))
    return probes


def _name_buckets(guard: Guard) -> None:
    for _, model in guard.models:
        if guard.collectives is not None and isinstance(model, DistributedDataParallel):
            guard.collectives.add_reducer(ReducerBuckets(model, guard.names.of))


def _divided(optimizers: Sequence[Any] | Any) -> Any:
    """The ZeroRedundancyOptimizer among them, or None."""
    listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return next((one for one in listed if is_zero_redundancy(one)), None)
