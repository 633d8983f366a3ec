"""What is no part of a training and differs from run to run: clocks, and writing checkpoints.

In:  functions of Megatron during which nothing is to be recorded.
Out: a guard that sees none of the tensors they exchange. What they leave behind, weights that were
     loaded, shows at the start of the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.pauses import paused
from upguard_plugin.integrations.wraps import wrap


class PauseProbe:
    """Pauses a guard during calls of some functions."""

    def __init__(self, guard: Guard, places: list[tuple[Any, str]]) -> None:
        """places: (module or class, name of a function of its own)."""
        self._guard = guard
        self._places = places
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Replace the functions. `detach` puts them back."""
        self._undo = [wrap(owner, name, self._pause) for owner, name in self._places]

    def detach(self) -> None:
        """Leave Megatron as it was."""
        while self._undo:
            self._undo.pop()()

    def _pause(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._undo:
            return original(*args, **kwargs)
        with paused(self._guard.recorder):
            return original(*args, **kwargs)
