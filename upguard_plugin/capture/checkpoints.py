"""Checkpoints: what goes into them, what comes out of them, and the state around them.

In:  calls of `torch.save` and `torch.load` with an object that holds a model's parameters or an
     optimizer's state; what adapters say of other formats (`record_file`, `record_state`).
Out: phase `checkpoint`, operator `save` or `load`: the content by its path in the object, at the
     boundary `checkpoint`; when something is saved also the state of the run, by its usual names.

What a load leaves in models and optimizers is seen where it is put there, by `restores`. Nothing
that happens inside these calls is recorded: it is no part of the training.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from upguard_plugin.capture.names import clean_name
from upguard_plugin.capture.pauses import aside, paused
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.restores import RestoreProbe
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot, readable
from upguard_plugin.capture.state import StateProbe
from upguard_plugin.capture.tensors import MAX_DEPTH, tensors_in
from upguard_plugin.capture.wraps import wrap
from upguard_plugin.fingerprint.dtensors import placement_of
from upguard_plugin.records import CHECKPOINT, OF_FILE, OF_FOLDER, OF_STATE

_PLAIN = (bool, int, float, str, type(None))
_MANY = 1000  # entries; to record each of 100,000 by itself takes seconds, and a MB per step
_SEARCHED_DEPTH = 4  # of an object, for the state dict of a model or an optimizer
_GROUPS = "param_groups"  # the key by which an optimizer's state dict is known


class CheckpointProbe:
    """Watches checkpoints that this thread writes and reads."""

    _attached: ClassVar[CheckpointProbe | None] = None

    def __init__(self, guard: Host, states: StateProbe) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._thread = threading.get_ident()
        self._states = states
        self._restores = RestoreProbe(guard, states)
        self._undo: list[Callable[[], None]] = []
        self._step_of_state = -1  # the last step in which a `torch.save` has recorded the state

    @classmethod
    def attached(cls) -> CheckpointProbe | None:
        """The probe of this process's guard: for hooks that stay in a library."""
        return cls._attached

    def attach(self) -> None:
        """Stand around torch's functions. `detach` puts them back."""
        CheckpointProbe._attached = self
        for module in (torch.serialization, torch):
            self._undo += [wrap(module, "save", self._save), wrap(module, "load", self._load)]
        self._restores.attach()

    def detach(self) -> None:
        """Leave torch as it was."""
        self._restores.detach()
        while self._undo:
            self._undo.pop()()
        if CheckpointProbe._attached is self:
            CheckpointProbe._attached = None

    def watches(self) -> bool:
        """Whether a call on this thread is to be recorded."""
        is_here = threading.get_ident() == self._thread
        return self.recorder.active and is_here and CheckpointProbe._attached is self

    def paused(self) -> AbstractContextManager[None]:
        """For the time in which a library writes or reads: nothing of that is recorded."""
        return paused(self.recorder)

    def aside(self) -> AbstractContextManager[None]:
        """For a thread that writes while the training goes on."""
        is_here = threading.get_ident() == self._thread
        return nullcontext() if is_here else aside(self.recorder)

    @shielded
    def record_file(
        self, operator: str, path: str, content: Any, *, is_folder: bool = False
    ) -> None:
        """Record what has been saved or loaded, if a model or an optimizer has a part in it.

        operator: "save" or "load". path: tells this checkpoint from others of the run. is_folder:
        all ranks write into it together.
        """
        if not self.recorder.active or not self._is_checkpoint(content):
            return
        if operator == "save" and self._step_of_state != self._guard.position.step:
            self._step_of_state = self._guard.position.step
            self.record_state(operator, path)
        call = self._guard.position.next_call(f"{CHECKPOINT} {operator}")
        with Snapshot(self._guard, "checkpoint", operator=operator, call=call) as now:
            now.value(CHECKPOINT, "output", OF_FOLDER if is_folder else OF_FILE, path)
            for slot, leaf in content_of(content):
                if isinstance(leaf, Tensor):
                    self._record_tensor(slot, leaf, operator, call)
                else:
                    now.value(CHECKPOINT, "output", slot, leaf)

    @shielded
    def record_state(
        self, operator: str, path: str, *, optimizers: bool = True, generators: bool = True
    ) -> None:
        """Record the state of the run, as it has been saved or as a load has left it.

        A load that is recorded here promises to restore it: an adapter calls this for checkpoints
        that hold everything. optimizers, generators: False: they are not in it.
        """
        if not self.recorder.active:
            return
        states, position = self._states, self._guard.position
        call = position.next_call(f"{CHECKPOINT} state {operator}")
        chosen = (True, optimizers, generators)
        records = (states.record_weights, states.record_optimizers, states.record_generators)
        self._guard.names.refresh()
        with Snapshot(self._guard, "checkpoint", operator=operator, call=call) as now:
            for part, is_chosen, record in zip(OF_STATE, chosen, records, strict=True):
                if is_chosen:
                    now.value(CHECKPOINT, "output", part, path)
                    record(now)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.watches():
            return original(*args, **kwargs)
        with self.paused():
            result = original(*args, **kwargs)
        given = dict(zip(("obj", "f"), args, strict=False)) | kwargs
        self.record_file("save", path_of(given.get("f")), given.get("obj"))
        return result

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.watches():
            return original(*args, **kwargs)
        with self.paused():
            result = original(*args, **kwargs)
        self.record_file("load", path_of(args[0] if args else kwargs.get("f")), result)
        return result

    def _record_tensor(self, slot: str, tensor: Tensor, operator: str, call: int) -> None:
        found = readable(tensor)
        self.recorder.record(
            CHECKPOINT, found, role="output", slot=slot, operator=operator, call=call,
            placement=placement_of(found),
        )  # fmt: skip

    def _is_checkpoint(self, content: Any) -> bool:
        names = self._guard.names.parameters
        ends = {end for name in names for end in _ends(name)}
        return any(
            key == _GROUPS or key in ends or not names.keys().isdisjoint(_ends(key))
            for key in _keys(content)
        )


def path_of(file: Any) -> str:
    """The path of a file that is given by its name or open; "" if it is in memory."""
    path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    return os.path.realpath(path) if isinstance(path, (str, os.PathLike)) and path else ""


def content_of(
    value: Any, path: str = "", holders: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of all that an object holds.

    A list of plain values is one leaf, and so is what holds very many of them in any nesting.

    holders: what the value lies in, outermost first; what contains itself is looked into once.
    """
    if len(holders) > MAX_DEPTH or any(value is holder for holder in holders):
        return
    inside = (*holders, value)
    if isinstance(value, (Mapping, list, tuple)) and len(value) > _MANY and _is_plain(value):
        yield path or "0", repr(_printable(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from content_of(item, f"{path}.{key}" if path else str(key), inside)
    elif isinstance(value, (list, tuple)) and not all(isinstance(v, _PLAIN) for v in value):
        for index, item in enumerate(value):
            yield from content_of(item, f"{path}.{index}" if path else str(index), inside)
    elif isinstance(value, (list, tuple)):
        yield path, repr(_printable(list(value)))
    else:
        yield from tensors_in(value, path or "0")


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether nothing but plain values is in it."""
    if not isinstance(value, (Mapping, list, tuple)):
        return isinstance(value, _PLAIN)
    items = chain(value, value.values()) if isinstance(value, Mapping) else value
    return depth < MAX_DEPTH and all(_is_plain(item, depth + 1) for item in items)


def _printable(value: Any) -> Any:
    """Plain values as they can be printed: Python prints no very long whole numbers as decimals."""
    if isinstance(value, Mapping):
        return [[_printable(key), _printable(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return f"{value:x}" if isinstance(value, int) and value.bit_length() > 64 else value


def _keys(value: Any, depth: int = 0) -> Iterator[str]:
    """Keys of the nested mappings, without wrappers' names."""
    if depth < _SEARCHED_DEPTH and isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield clean_name(key)
            yield from _keys(item, depth + 1)


def _ends(name: str) -> Iterable[str]:
    """ "a.b.c", "b.c": a state dict may be that of a part, or of a whole with this as a part."""
    parts = name.split(".")
    return (".".join(parts[i:]) for i in range(max(len(parts) - 1, 1)))
