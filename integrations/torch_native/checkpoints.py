"""torch.distributed.checkpoint: what is saved and what is loaded, each rank's part of it.

In:  its modules `state_dict_saver` and `state_dict_loader`, as soon as they are imported.
Out: what `CheckpointProbe.record_file` records, under the checkpoint's id.

`save` and `load` may have been copied by name: they look up these inner functions when called. What
`async_save` is given is recorded when it is called: it is copied before the call returns. It is
written by a thread beside the training, whose collectives are no part of that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from upguard_plugin.capture.checkpoints import CheckpointProbe
from upguard_plugin.integrations.when_imported import when_imported
from upguard_plugin.integrations.wraps import wrap

_MODULES = ("state_dict_saver", "state_dict_loader", "")  # "": the package, which has copies


class DistributedCheckpoints:
    """Stands around the functions that every save and load passes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Replace them, now or when they are imported. `detach` puts them back."""
        for name in _MODULES:
            full_name = f"torch.distributed.checkpoint.{name}".removesuffix(".")
            self._undo.append(when_imported(full_name, self._patch))

    def detach(self) -> None:
        """Leave torch as it was."""
        while self._undo:
            self._undo.pop()()

    def _patch(self, module: ModuleType) -> None:
        around = {"_save_state_dict": _save, "_load_state_dict": _load, "async_save": _async_save}
        self._undo += [wrap(module, name, around[name]) for name in around if name in vars(module)]


def _probe() -> CheckpointProbe | None:
    """The probe that records this call, if one does."""
    probe = CheckpointProbe.attached()
    return probe if probe is not None and probe.watches() else None


def _save(
    original: Callable[..., Any], state_dict: Any, storage_writer: Any, *args: Any, **kw: Any
) -> Any:
    return _told("save", original, state_dict, storage_writer, *args, **kw)


def _load(
    original: Callable[..., Any], state_dict: Any, storage_reader: Any, *args: Any, **kw: Any
) -> Any:
    return _told("load", original, state_dict, storage_reader, *args, **kw)


def _told(
    operator: str,
    original: Callable[..., Any],
    state_dict: Any,
    storage: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    probe, attached = _probe(), CheckpointProbe.attached()
    if probe is None:
        with nullcontext() if attached is None else attached.aside():
            return original(state_dict, storage, *args, **kwargs)
    with probe.paused():
        result = original(state_dict, storage, *args, **kwargs)
    probe.record_file(operator, _path_of(storage), state_dict, is_folder=True)
    return result


def _async_save(original: Callable[..., Any], state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    probe = _probe()
    if probe is None:
        return original(state_dict, *args, **kwargs)
    values = {
        key: part.state_dict() if hasattr(part, "state_dict") else part
        for key, part in state_dict.items()
    }
    storage = kwargs.get("storage_writer")
    path = _path_of(storage, kwargs.get("checkpoint_id"))
    probe.record_file("save", path, values, is_folder=True)
    with probe.paused():
        return original(state_dict, *args, **kwargs)


def _path_of(storage: Any, checkpoint_id: Any = None) -> str:
    named = checkpoint_id or getattr(storage, "checkpoint_id", None)
    return os.path.realpath(named or getattr(storage, "path", "") or "")
