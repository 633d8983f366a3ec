"""ZeroRedundancyOptimizer: each rank updates some parameters, and all ranks get all of them.

In:  the optimizer given to `enable`.
Out: the states that this rank's own optimizer holds, placed on one rank of their axis; the
     broadcasts behind the update in phase `param_sync`.

With `overlap_with_ddp` no step is called: then states show at the start of the next step only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.placements import Placements
from upguard_plugin.integrations.wraps import wrap
from upguard_plugin.records import Layout, Placement

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
_DIVIDED = frozenset({"optimizer_state", "master"})  # roles of which one rank holds each tensor
_EVERYWHERE = "*"  # the placement of what only an axis called `dp` speaks of


def is_zero_redundancy(optimizer: Any) -> bool:
    """Whether it is one; torch's module is not loaded for the answer."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class DividedPlacements(Placements):
    """States lie whole on one rank of the optimizer's group, and on no other."""

    def __init__(self, rules: Mapping[str, Any] | None, layout: Layout, optimizer: Any) -> None:
        """Raises as `Placements`."""
        super().__init__(rules, layout)
        ranks = tuple(torch.distributed.get_process_group_ranks(optimizer.process_group))
        self._axes = tuple(axis.name for axis in layout.axes if axis.ranks == ranks)[:1]

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        found = super()._find(boundary, role, slot, shape)
        if found is None or role not in _DIVIDED or found.spec != _EVERYWHERE:
            return found
        return replace(found, spec=f"* on one rank of {','.join(self._axes)}", sharded=self._axes)


class ZeroRedundancyProbe:
    """Shows the guard what lies behind the optimizer."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Stand around its broadcasts. `detach` undoes it."""
        self._guard.states.optimizers.state_of = state_of
        owner = sys.modules[_MODULE].ZeroRedundancyOptimizer
        self._undo.append(wrap(owner, "_sync_params", self._sync))

    def detach(self) -> None:
        """Leave torch as it was."""
        while self._undo:
            self._undo.pop()()

    def _sync(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._guard.position.in_phase("param_sync"):
            return original(*args, **kwargs)


def state_of(optimizer: Any) -> Mapping[Any, Any]:
    """The states by parameter that this rank holds; none before the first use."""
    if is_zero_redundancy(optimizer):
        optimizer = getattr(optimizer, "optim", None)
    return getattr(optimizer, "state", None) or {}
