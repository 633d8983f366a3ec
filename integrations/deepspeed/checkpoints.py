"""DeepSpeed's checkpoints: the state of the run as it was saved, and as a load has left it.

In:  calls of `engine.save_checkpoint` and `engine.load_checkpoint`.
Out: what `CheckpointProbe.record_state` records. Files, tags and barriers in between are no part of
     the training: they are not recorded. Random generators are not in these checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from upguard_plugin.capture.checkpoints import CheckpointProbe
from upguard_plugin.capture.guard import Guard

GuardOf = Callable[[Any], Guard | None]


def around(record: Callable[..., None]) -> Callable[..., Any]:
    """A function to stand around an engine's method: what `record` says of each call."""

    def call(
        guard_of: GuardOf, original: Callable[..., Any], engine: Any, *args: Any, **kw: Any
    ) -> Any:
        guard = guard_of(engine)
        if guard is None or not guard.active:
            return original(engine, *args, **kw)
        with guard.checkpoints.paused():
            result = original(engine, *args, **kw)
        record(guard.checkpoints, engine, result, *args, **kw)
        return result

    return call


@around
def save(probe: CheckpointProbe, engine: Any, _result: Any, *args: Any, **kw: Any) -> None:
    """Around `save_checkpoint(save_dir, tag=None, ...)`."""
    given = dict(zip(("save_dir", "tag"), args, strict=False)) | kw
    tag = given.get("tag") or f"global_step{engine.global_steps}"
    folder = str((Path(given["save_dir"]) / str(tag)).resolve())
    probe.record_state("save", folder, generators=False)


@around
def load(probe: CheckpointProbe, _engine: Any, result: Any, *args: Any, **kw: Any) -> None:
    """Around `load_checkpoint`, which returns a file inside the folder that it has read."""
    names = (
        "load_dir", "tag", "load_module_strict", "load_optimizer_states",
        "load_lr_scheduler_states", "load_module_only",
    )  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kw
    everything = given.get("load_optimizer_states", True) and not given.get("load_module_only")
    path = result[0] if isinstance(result, tuple) else None
    if path:  # None: there was nothing to load
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        probe.record_state("load", str(folder.resolve()), optimizers=everything, generators=False)
