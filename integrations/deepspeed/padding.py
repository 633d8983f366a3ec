"""The padding of ZeRO 3's tensors, for level op.

In:  an engine's optimizer and the shards of this rank.
Out: to the storages, which elements of flat tensors are no values.

DeepSpeed leaves the padding of a weight's last part as memory had it, makes masters of it and has
the optimizer step on it. All of it was there before operators were followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from upguard_plugin.capture import padding
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.integrations.deepspeed.shards import Shards


class Padding:
    """Tells of the padding that an engine keeps from step to step."""

    def __init__(self, guard: Guard, engine: Any, shards: Shards) -> None:
        self.recorder = guard.recorder
        self._parameters = guard.names.parameters
        self._optimizer = engine.optimizer
        self._shards = shards

    def tell(self, _now: Snapshot) -> None:
        """To be called at the start of each step: what was known may have been forgotten."""
        storages = self.recorder.storages
        if storages is None:
            return
        for name, parameter in self._parameters.items():
            owned = getattr(parameter, "ds_tensor", None)
            shard = self._shards.by_name.get(name)
            if isinstance(owned, Tensor) and shard is not None and shard.size < owned.numel():
                padding.tell(storages, owned, [(0, shard.size)] if shard.size > 0 else [])
        for flat, values in self._flats():
            padding.tell(storages, flat, values)

    def _flats(self) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
        """Masters, and the optimizer's states, which are laid out as they are."""
        inner = getattr(self._optimizer, "optimizer", None)
        for master in getattr(self._optimizer, "fp32_partitioned_groups_flat", ()):
            fragments = () if master is None else self._shards.fragments_of(master)
            values = [(fragment.start, fragment.start + fragment.size) for fragment in fragments]
            if not values or sum(stop - start for start, stop in values) == master.numel():
                continue
            yield master, values
            for state in getattr(inner, "state", {}).get(master, {}).values():
                if isinstance(state, Tensor) and state.shape == master.shape:
                    yield state, values
