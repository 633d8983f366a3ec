"""Which forward call a recomputed call repeats.

In:  every forward call in a region under activation checkpointing; every call during backward.
Out: for a recomputed call the call number of its forward.

Regions are recomputed last first, but inside a region calls come in forward order: a module that is
called several times in a micro-batch is matched by region, not by a count of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

Region = int


@dataclass(slots=True)
class RecomputeCalls:
    """The forward calls of a step that are still to be recomputed."""

    _pending: dict[tuple[str, int], list[tuple[Region, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _current: Region | None = None  # the region that is being recomputed
    _num_regions: int = 0

    def clear(self) -> None:
        """Forget everything: a step is over."""
        self._pending.clear()
        self._current = None

    def region_of(self, outer: tuple[bool, Region | None]) -> Region | None:
        """The region in which a forward call runs, or None outside checkpointing.

        outer: whether gradients are on in the call around this one, and that call's region.
        Non-reentrant checkpointing shows in the saved-tensor hooks, whose pack function belongs to
        one region; reentrant checkpointing in that gradients are off inside and on outside.
        """
        if torch.is_grad_enabled():
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            return id(hooks[0]) if hooks else None
        grad_outside, region = outer
        if not grad_outside:
            return region
        self._num_regions += 1
        return -self._num_regions

    def add(self, boundary: str, microbatch: int, call: int, region: Region) -> None:
        """A forward call that will be recomputed."""
        self._pending[boundary, microbatch].append((region, call))

    def match(self, boundary: str, microbatch: int) -> int | None:
        """The number of the forward call that this call repeats; None if no forward was seen."""
        pending = self._pending.get((boundary, microbatch))
        if not pending:
            return None
        regions = [region for region, _ in pending]
        if self._current not in regions:
            self._current = regions[-1]
        return pending.pop(regions.index(self._current))[1]
