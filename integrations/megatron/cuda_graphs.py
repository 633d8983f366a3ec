"""CUDA graphs: modules that are replayed as a whole, past all hooks.

In:  the modules of a model that Megatron may replay, and its functions that capture graphs.
Out: what enters and leaves a replayed module, at its own boundary; nothing from inside it, which is
     said. While a graph is captured nothing is recorded: what we put on the stream would be in it.

Megatron calls a graph in one of two places. Graphs of Transformer Engine are replayed by a method
of the module, Megatron's own by a runner that knows its module.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.modules import between
from upguard_plugin.capture.shield import Hook
from upguard_plugin.integrations.wraps import wrap

_REPLAY = "_te_cuda_graph_replay"
# (class or None: a function of the module, name), each absent in some versions.
_CAPTURES = (("TECudaGraphHelper", "create_cudagraphs"), (None, "create_cudagraphs"))


class GraphProbe:
    """Watches modules at the edge of their graphs."""

    def __init__(self, guard: Guard, graphs: ModuleType | None) -> None:
        """graphs: Megatron's module of its own graphs; None where it has none."""
        self.recorder = guard.recorder
        self._guard = guard
        self._graphs = graphs
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Stand around what replays a graph. `detach` takes it away."""
        for name, module in self._guard.names.walk():
            if hasattr(module, _REPLAY) and _REPLAY not in vars(module):
                self._stand_around(name, module)
        runner = getattr(self._graphs, "_CudaGraphRunner", None)
        if runner is not None and "replay_graph_capture" in vars(runner):
            self._undo.append(wrap(runner, "replay_graph_capture", self._replay))

    def detach(self) -> None:
        """Leave Megatron as it was."""
        while self._undo:
            self._undo.pop()()

    def _stand_around(self, name: str, module: Any) -> None:
        replay = getattr(module, _REPLAY)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, module, replay, args, kwargs)

        setattr(module, _REPLAY, call)
        self._undo.append(lambda: delattr(module, _REPLAY))

    def _replay(self, original: Callable[..., Any], runner: Any, *given: Any, **named: Any) -> Any:
        """In place of `replay_graph_capture(self, is_first_microbatch, args, kwargs)`."""
        name = self._guard.names.of(runner.base_module)
        if not self._undo or name is None or len(given) != 3:
            return original(runner, *given, **named)
        first, args, kwargs = given

        def replay(*args: Any, **kwargs: Any) -> Any:
            return original(runner, first, args, kwargs)

        return self._call(name, runner.base_module, replay, args, kwargs)

    def _call(
        self,
        name: str,
        module: Any,
        replay: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.recorder.note(f"inside {name} nothing was recorded where it ran as a CUDA graph")
        before = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]
        after = [hook for hook in module._forward_hooks.values() if isinstance(hook, Hook)]
        if not before or not after:
            return replay(*args, **kwargs)
        return between(module, before[0], replay, after[0])(*args, **kwargs)


def captures(graphs: ModuleType | None, schedules: ModuleType) -> list[tuple[Any, str]]:
    """(owner, function) of what captures graphs, as far as this Megatron has it."""
    owners = [(getattr(graphs, cls, None) if cls else graphs, name) for cls, name in _CAPTURES]
    owners.append((schedules, "create_cudagraphs"))  # by its own name for it
    return [(owner, name) for owner, name in owners if owner is not None and name in vars(owner)]
