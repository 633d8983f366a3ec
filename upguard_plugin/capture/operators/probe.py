"""Watches every operator that the dispatcher shows: forward, backward, optimizer.

In:  operators, below autograd, as a `TorchDispatchMode` sees them.
Out: for each, its inputs and its outputs as events of the module (or parameter) it works for.

A tensor that nobody wrote since it was last hashed is not hashed again: the recorder knows from
`storages.py`, which this probe keeps up to date. What newcomers get wrong: the operators of our own
hashing run through this mode too. The recorder says when it is at work, and the mode looks away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from upguard_plugin.capture.operators.places import NodePlaces, Place, accumulated_parameter
from upguard_plugin.capture.operators.schema import Operator, describe
from upguard_plugin.capture.operators.source import SourceFinder
from upguard_plugin.capture.operators.storages import Storages
from upguard_plugin.records import Source

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


@dataclass(frozen=True, slots=True)
class Running:
    """An operator between its inputs and its outputs."""

    operator: Operator
    boundary: str
    phase: str
    microbatch: int
    call: int
    source: Source | None


class OperatorProbe(TorchDispatchMode):
    """One mode for the whole run; it looks away outside the selected steps and modules."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would fall back to eager under this mode: another program.
        return True

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard
        self._recorder = guard.recorder
        self._position = guard.position
        self._nodes = NodePlaces()
        self._sources = SourceFinder()

    def attach(self) -> None:
        self._recorder.storages = Storages()
        self.__enter__()

    def detach(self) -> None:
        self._recorder.storages = None
        self._nodes.clear()
        leave_mode(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if not recorder.active or recorder.at_work:
            return func(*args, **kwargs)
        running = self._before(func, args, kwargs)
        result = func(*args, **kwargs)  # what it raises is the user's
        if running is not None:
            self._after(running, args, kwargs, result)
        return result
