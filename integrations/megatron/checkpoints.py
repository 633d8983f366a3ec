"""Megatron-LM's checkpoints: the state of the run as it was saved, and as a load has left it.

In:  calls of `save_checkpoint` and `load_checkpoint` in `megatron.training.training`; the flags.
Out: what `CheckpointProbe.record_state` records, with how many samples have been consumed. What is
     exchanged inside (clocks, objects as pickled bytes) is no part of the training.

A resumed program loads before its guard begins: `resumed` records that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.integrations.wraps import wrap

_SAMPLES = "consumed_train_samples"  # where the data loader of a resumed run goes on


class CheckpointProbe:
    """Stands around saving and loading."""

    def __init__(self, guard: Guard, training: ModuleType) -> None:
        self._guard = guard
        self._training = training
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Replace the functions, where they are. `detach` puts them back."""
        for name, around in (("save_checkpoint", self._save), ("load_checkpoint", self._load)):
            if name in vars(self._training):
                self._undo.append(wrap(self._training, name, around))
        self._guard.states.sources.append(self._record_samples)

    def detach(self) -> None:
        """Leave Megatron as it was."""
        while self._undo:
            self._undo.pop()()

    def resumed(self) -> None:
        """Record what the load has left that came before the guard, if there was one."""
        args = self._training.get_args()
        iteration = getattr(args, "iteration", 0)
        if iteration and getattr(args, "load", None):
            self._record_load(iteration)

    def _save(self, original: Callable[..., Any], iteration: Any, *args: Any, **kw: Any) -> Any:
        if not self._undo or not self._guard.active:
            return original(iteration, *args, **kw)
        with self._guard.checkpoints.paused():
            result = original(iteration, *args, **kw)
        flags = self._training.get_args()
        self._guard.checkpoints.record_state(
            "save",
            _path(getattr(flags, "save", None), iteration),
            optimizers=not getattr(flags, "no_save_optim", None),
            generators=not getattr(flags, "no_save_rng", None),
        )
        return result

    def _load(self, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        if not self._undo or not self._guard.active:
            return original(*args, **kw)
        with self._guard.checkpoints.paused():
            result = original(*args, **kw)
        if isinstance(result, tuple) and result and result[0]:
            self._record_load(result[0])
        return result

    def _record_load(self, iteration: int) -> None:
        flags = self._training.get_args()
        restarts = bool(getattr(flags, "finetune", None))
        self._guard.checkpoints.record_state(
            "load",
            _path(getattr(flags, "load", None), iteration),
            optimizers=not (restarts or getattr(flags, "no_load_optim", None)),
            generators=not (restarts or getattr(flags, "no_load_rng", None)),
        )

    def _record_samples(self, now: Snapshot) -> None:
        consumed = getattr(self._training.get_args(), _SAMPLES, None)
        if consumed is not None:
            now.value(_SAMPLES, "scalar", "0", consumed)


def _path(folder: str | None, iteration: Any) -> str:
    return str((Path(folder or "") / f"iter_{int(iteration):07d}").resolve())
