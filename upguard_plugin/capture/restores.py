"""What `load_state_dict` is given, and what it leaves.

In:  calls of it on recorded models, parts of them, and torch optimizers.
Out: phase `checkpoint`, operator `load`, by the usual names: the given value with moment `before`,
     then the value that is there afterwards.

A parameter is given in its own dtype: to load other precisions is common and rounds once. An
optimizer's state is given as it is: torch casts it to the parameter's dtype, and what was a float32
moment or master comes back as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.clipping import Replacement
from upguard_plugin.capture.held import leaves_of
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import shielded
from upguard_plugin.capture.snapshot import Snapshot
from upguard_plugin.capture.state import StateProbe
from upguard_plugin.capture.wraps import wrap
from upguard_plugin.records import CHECKPOINT, OF_RESTORE


@dataclass(frozen=True, slots=True)
class _Item:
    """One value of a state dict and where it goes."""

    boundary: str
    role: str
    slot: str
    given: Any
    now: Callable[[], Any]  # what is there


class RestoreProbe:
    """Watches state dicts on their way into models and optimizers."""

    def __init__(self, guard: Host, states: StateProbe) -> None:
        self._states = states
        self.recorder = guard.recorder
        self._guard = guard
        self._undo: list[Callable[[], None]] = []
        self._depth = 0  # of calls: a model's own may load its parts

    def attach(self) -> None:
        """Stand around `load_state_dict`. `detach` undoes it."""
        self._undo.append(wrap(nn.Module, "load_state_dict", self._load_module))
        for watched in self._states.optimizers.watched:
            if isinstance(watched.optimizer, torch.optim.Optimizer):
                self._undo.append(self._watch_optimizer(watched.name, watched.optimizer))

    def detach(self) -> None:
        """Leave torch and the optimizers as they were."""
        while self._undo:
            self._undo.pop()()

    def _load_module(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kw: Any
    ) -> Any:
        given = args[0] if args else kw.get("state_dict")
        assign = args[2] if len(args) > 2 else kw.get("assign", False)
        items = self._items_of_module(module, given, assign) if self._depth == 0 else None
        self._depth += 1
        try:
            result = original(module, *args, **kw)
        finally:
            self._depth -= 1
        self._record(type(module).__name__, items)
        return result

    def _watch_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """On the object: what a subclass does behind torch's own method is seen too."""
        items: list[_Item] | None = None

        def before(state_dict: Any, *_args: Any, **_kwargs: Any) -> None:
            nonlocal items
            items = self._items_of_optimizer(name, optimizer, state_dict)

        def after(*_args: Any, **_kwargs: Any) -> None:
            self._record(type(optimizer).__name__, items)

        return Replacement(optimizer, "load_state_dict", before, after).remove

    @shielded
    def _items_of_module(self, module: nn.Module, given: Any, assign: bool) -> list[_Item] | None:
        if not self._undo or not self.recorder.active or not isinstance(given, Mapping):
            return None
        if type(module).load_state_dict is not nn.Module.load_state_dict:
            return None  # what it does before and behind torch's own method is not known
        names, closed = self._guard.names, _closed_parts(module)
        items = []
        for role, tensors in (
            ("param", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        ):
            for key, live in tensors:
                name, value = names.of(live), given.get(key)
                if name is None or key.startswith(closed) or not isinstance(value, Tensor):
                    continue
                if _fits(value, live):
                    value = value if assign else _in_dtype(value, live.dtype)
                    items.append(_Item(name, role, "value", value, _Found(module, key)))
        return items

    @shielded
    def _items_of_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, given: Any
    ) -> list[_Item] | None:
        if not self.recorder.active or not isinstance(given, Mapping):
            return None
        probe = self._states.optimizers
        groups = list(zip(given.get("param_groups", ()), optimizer.param_groups, strict=False))
        items = []
        for number, (theirs, ours) in enumerate(groups):
            for key in sorted((theirs.keys() & ours.keys()) - {"params"}):
                setting = _Setting(optimizer, number, key)
                boundary = f"{name}.group{number}.{key}"
                items.append(_Item(boundary, "scalar", "0", theirs[key], setting))
            for index, parameter in zip(theirs["params"], ours["params"], strict=False):
                owner = probe.masters.name_of(parameter)
                for slot, value in leaves_of(given["state"].get(index)) if owner else ():
                    state = _State(partial(probe.state_of, optimizer), parameter, slot)
                    items.append(_Item(owner or "", "optimizer_state", slot, value, state))
        return items

    @shielded
    def _record(self, who: str, items: list[_Item] | None) -> None:
        if not items or not self.recorder.active:
            return
        self._guard.names.refresh()  # `assign` replaces parameters
        call = self._guard.position.next_call(f"{CHECKPOINT} {OF_RESTORE} {who}")
        with Snapshot(self._guard, "checkpoint", operator="load", call=call) as now:
            now.value(CHECKPOINT, "output", OF_RESTORE, who)
            for item in items:
                found = item.now()
                if found is None:
                    continue
                now.moment = "before"
                now.value(item.boundary, item.role, item.slot, _as(item.given, found))
                now.moment = None
                now.value(item.boundary, item.role, item.slot, _plain(found))


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of a module, as it is when asked."""

    module: nn.Module
    key: str

    def __call__(self) -> Tensor | None:
        path, _, leaf = self.key.rpartition(".")
        found = getattr(self.module.get_submodule(path), leaf, None)
        return found if isinstance(found, Tensor) else None


@dataclass(frozen=True, slots=True)
class _Setting:
    optimizer: torch.optim.Optimizer
    number: int
    key: str

    def __call__(self) -> Any:
        return self.optimizer.param_groups[self.number].get(self.key)


@dataclass(frozen=True, slots=True)
class _State:
    states: Callable[[], Mapping[Any, Any]]
    parameter: Tensor
    slot: str

    def __call__(self) -> Any:
        return dict(leaves_of(self.states().get(self.parameter))).get(self.slot)


def _closed_parts(module: nn.Module) -> tuple[str, ...]:
    """Prefixes of parts that load in a way of their own: what they are given is not what they keep.

    "" is a part too: then nothing is looked at.
    """
    return tuple(
        f"{name}." if name else "" for name, part in module.named_modules() if _is_closed(part)
    )


def _is_closed(part: nn.Module) -> bool:
    hooks = [*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()]
    functions = [type(part)._load_from_state_dict, *(getattr(h, "hook", h) for h in hooks)]
    return not all(
        str(getattr(function, "__module__", "")).startswith("torch.") for function in functions
    )


def _fits(value: Tensor, live: Tensor) -> bool:
    are_alike = hasattr(value, "placements") == hasattr(live, "placements")
    return are_alike and value.shape == live.shape


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == dtype:
        return value
    with torch.no_grad(), _disable_current_modes():  # the copy is ours: no mode is to see it made
        return value.detach().to(dtype)


def _as(given: Any, found: Any) -> Any:
    """A given number in the form in which it is kept."""
    if isinstance(found, Tensor) and isinstance(given, bool | int | float):
        with _disable_current_modes():
            return torch.full((), given, dtype=found.dtype).expand(found.shape)
    return _plain(given)


def _plain(value: Any) -> Any:
    """1 and 1.0 are the same setting; a tuple is one value."""
    if type(value) is int:
        return float(value)
    return repr(value) if isinstance(value, (list, tuple, dict)) else value
