"""Recording a hand-written training loop that says nothing to UpGuard.

In:  UPGUARD=1, and a script that calls its models and steps its torch optimizers.
Out: a Guard on the models that own the optimizers' parameters, from the first training forward on.

What a loop would say by `enable`, `microbatch` and `step` is seen from outside: the first call of a
module with an optimizer's parameters, each further call of the same model, each optimizer step. A
script or an adapter that has a guard of its own keeps it, and this watch withdraws.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from upguard_plugin.integrations.attach import attach

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


def watch() -> Callable[[], None]:
    """Wait for a training loop in this process. Returns a function that ends the wait."""
    found = _Watch()
    found.begin()
    return found.end


class _Watch:
    """Two class attributes of torch are replaced until the first training forward, no longer."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._waiting = False

    def begin(self) -> None:
        self._waiting = True
        self._original_init, self._original_call = Optimizer.__init__, nn.Module.__call__
        self._init, self._call = self._watched_init(), self._watched_call()
        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        nn.Module.__call__ = self._call  # type: ignore[method-assign]

    def end(self) -> None:
        self._waiting = False
        if Optimizer.__init__ is self._init:
            Optimizer.__init__ = self._original_init  # type: ignore[method-assign]
        if nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._original_call  # type: ignore[method-assign]

    def _watched_init(self) -> Callable[..., None]:
        original = self._original_init

        @functools.wraps(original)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))

        return __init__

    def _watched_call(self) -> Callable[..., Any]:
        original = self._original_call

        # Not a forward pre-hook: hooks that a hook adds are not run for the call in progress, and
        # the first forward would be lost.
        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._waiting and self._optimizers and not torch.compiler.is_compiling():
                self._on_call(module)
            return original(module, *args, **kwargs)

        return __call__

    def _on_call(self, module: nn.Module) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        optimizers = [o for reference in self._optimizers if (o := reference()) is not None]
        if _parameter_ids(optimizers).isdisjoint(map(id, module.parameters())):
            return
        self.end()
        objects = gc.get_objects()
        if not _has_guard(objects):
            _Loop(find_models(module, optimizers, objects), optimizers).record(first=module)


def _parameter_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}


def _has_guard(objects: list[Any]) -> bool:
    capture = sys.modules.get("upguard_plugin.capture.guard")
    return capture is not None and any(
        issubclass(type(o), capture.Guard) and not getattr(o, "_closed", False) for o in objects
    )


def find_models(
    called: nn.Module, optimizers: Iterable[Optimizer], objects: Iterable[Any]
) -> list[nn.Module]:
    """The outermost modules among `objects` that own parameters of the optimizers.

    Each such parameter is in exactly one of them, or in none. The model around `called` (or called
    itself) comes first; the others follow in the order of their parameters in the optimizers.
    """
    # By type: asking lazy proxies among the objects for their class could run their code.
    modules = [o for o in objects if issubclass(type(o), nn.Module)]
    inner = {id(child) for m in modules for child in m.children()}
    outer = [m for m in modules if id(m) not in inner]
    wanted = _parameter_ids(optimizers)
    owned = {id(m): {id(p) for p in m.parameters()} & wanted for m in outer}
    order = {
        id(p): place
        for place, p in enumerate(
            p for o in optimizers for g in o.param_groups for p in g["params"]
        )
    }
    around = [m for m in outer if any(inside is called for inside in m.modules())]
    # Of two wrappers around one model the narrower one is the model, the wider some holder of it.
    around.sort(key=lambda m: len(owned[id(m)]))
    first = around[:1] or [called]
    others = [m for m in outer if owned[id(m)] and m is not first[0]]
    others.sort(key=lambda m: (min(order[place] for place in owned[id(m)]), -len(owned[id(m)])))
    models: list[nn.Module] = []
    covered: set[int] = set()
    for model in [*first, *others]:
        mine = {id(p) for p in model.parameters()} & wanted
        if mine and covered.isdisjoint(mine):
            models.append(model)
            covered |= mine
    return models


class _Loop:
    """Says to the guard what the loop does not say: micro-batches and steps."""

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._called: set[int] = set()  # models that ran in this micro-batch
        self._microbatch = 0
        self._stepped = False  # an optimizer has stepped, and the step is not over yet

    def record(self, first: nn.Module) -> None:
        """Begin to record. `first` is the module that is about to run."""
        guard = attach(self._make_guard, "this training loop")
        if guard is None:
            return
        self._guard = guard
        watched = self._models if any(m is first for m in self._models) else [*self._models, first]
        for module in watched:
            # First in line: the module's own hooks must already see the new micro-batch.
            module.register_forward_pre_hook(self._on_forward, prepend=True)
        several = len(self._optimizers) > 1
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._on_several_step if several else self._on_step)
        if several:
            atexit.register(self._end_step)

    def _make_guard(self) -> Guard:
        # Slow to load, and rarely needed.
        from upguard_plugin.integrations.torch_native import enable

        return enable(_one_or_all(self._models), _one_or_all(self._optimizers))

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        self._end_step()
        if id(module) in self._called:
            self._microbatch += 1
            self._called.clear()
        self._called.add(id(module))
        self._guard.microbatch(self._microbatch)

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
        self._end_step()

    def _on_several_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Optimizers that step one after the other make one step: it ends at the next forward.
        self._stepped = True

    def _end_step(self) -> None:
        if self._stepped:
            self._stepped = False
            self._microbatch = 0
            self._called.clear()
            self._guard.step()


def _one_or_all(things: list[Any]) -> Any:
    """A single model has no number before its names."""
    return things if len(things) > 1 else things[0]
