"""Uneven inputs: a rank that has run out of them goes through the steps of the others.

In:  torch's context manager `Join`, which `DistributedDataParallel.join` uses too.
Out: a step here for each step that ranks with inputs make, so that steps of all ranks stay in line.

A rank that has joined shadows the collectives of one iteration after another, and the program says
no step meanwhile. How many iterations make a step is what this rank's own last step had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import Join

from upguard_plugin.capture.guard import Guard
from upguard_plugin.integrations.wraps import wrap


class UnevenInputs:
    """Follows the iterations of this rank, and those that it shadows."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._step = 0
        self._iterations = 0  # of this step so far
        self._per_step = 1
        self._shadows = False  # an iteration of others now
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Stand around what torch calls once per iteration. `detach` undoes it."""
        self._undo.append(wrap(Join, "notify_join_context", self._iterates))
        self._undo.append(wrap(Join, "_get_num_nonjoined_procs", self._asks_who_is_left))

    def detach(self) -> None:
        """Leave torch as it was."""
        while self._undo:
            self._undo.pop()()

    def _iterates(self, original: Callable[..., Any], joinable: Any) -> Any:
        config = getattr(joinable, "_join_config", None)
        if config is not None and config.enable and config.is_first_joinable:
            self._count()
        return original(joinable)

    def _asks_who_is_left(self, original: Callable[..., Any], join: Any) -> Any:
        if self._shadows:  # and that iteration is over
            self._count()
            if self._iterations == self._per_step:
                self._guard.step()
        num_left = original(join)
        self._shadows = num_left > 0
        return num_left

    def _count(self) -> None:
        step = self._guard.position.step
        if step != self._step:
            self._per_step = max(self._iterations, 1)
            self._step, self._iterations = step, 0
        self._iterations += 1
