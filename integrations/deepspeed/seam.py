"""Where UpGuard meets DeepSpeed: `deepspeed.initialize`.

In:  the deepspeed module, just imported.
Out: an `initialize` that also looks for the `"upguard"` block and UPGUARD=1. Off, that look is all
     it does; on, the engine it made is recorded.

A block that cannot take effect must not go unnoticed: DeepSpeed itself ignores keys it does not
know. So a DeepSpeed that is too old stops the job, and an engine that was made without `initialize`
is reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from upguard_plugin.integrations.attach import attach, say
from upguard_plugin.integrations.deepspeed.block import KEY, find_settings, read_config
from upguard_plugin.integrations.deepspeed.versions import check_version
from upguard_plugin.integrations.wraps import wrap

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


def patch(module: ModuleType) -> Callable[[], None]:
    """Wrap `deepspeed.initialize`. Returns what takes every wrap off again."""
    seam = _Seam(module)
    if seam.is_there():
        return lambda: None
    return seam.install()


class _Seam:
    def __init__(self, module: ModuleType) -> None:
        self._deepspeed = module
        self._signature = inspect.signature(module.initialize)
        self._engines: Any = None  # EngineWraps, once an engine is recorded
        self._is_initializing = False

    def is_there(self) -> bool:
        return hasattr(self._deepspeed.initialize, "__upguard__")

    def install(self) -> Callable[[], None]:
        undo = [wrap(self._deepspeed, "initialize", self._initialize)]
        self._deepspeed.initialize.__upguard__ = True
        engine_class = getattr(self._deepspeed, "DeepSpeedEngine", None)
        if engine_class is not None:
            undo.append(wrap(engine_class, "__init__", self._make_engine))

        def remove() -> None:
            for each in undo:
                each()
            if self._engines is not None:
                self._engines.remove()

        return remove

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # says what is wrong with them
        settings = find_settings(arguments)
        if settings is None:
            return original(*args, **kwargs)
        check_version(self._deepspeed.__version__)
        self._deepspeed.initialize.__upguard__ = "used"  # `integrations/hugging_face` asks
        self._is_initializing = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._is_initializing = False
        self._record(result[0], settings)
        return result

    def _make_engine(
        self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(engine, *args, **kwargs)
        if not self._is_initializing and _asks_for_us(engine):
            say("not recorded: this engine was not made by deepspeed.initialize, so its block")
            say(f'"{KEY}" has no effect; call upguard_plugin.enable(engine.module, optimizer)')

    def _record(self, engine: Any, settings: Any) -> None:
        # Slow to load, and only now needed: this module is imported with every deepspeed.
        from upguard_plugin.integrations.deepspeed.adapter import begin
        from upguard_plugin.integrations.deepspeed.engine import EngineWraps

        if self._engines is not None and len(self._engines):
            say("not recorded: a second DeepSpeed engine in one process; the first one is")
            return
        if self._engines is None:
            pipeline = getattr(self._deepspeed, "PipelineEngine", None)
            self._engines = EngineWraps(self._deepspeed.DeepSpeedEngine, pipeline)
        engines = self._engines

        def make_guard() -> Guard:
            guard = begin(engine, settings, self._deepspeed.__version__)
            engines.record(engine, guard)
            return guard

        attach(make_guard, "this DeepSpeed engine")


def _asks_for_us(engine: Any) -> bool:
    content = read_config(getattr(engine._config, "_param_dict", None))
    block = content.get(KEY)
    return isinstance(block, Mapping) and block.get("enabled", True) is True
