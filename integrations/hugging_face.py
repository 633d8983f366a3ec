"""Accelerate and the Hugging Face Trainer: a DeepSpeed config that they read and do not use.

In:  the module accelerate.utils.deepspeed, just imported.
Out: a line on stderr, at the end, where a config had our block enabled and no engine was made of it
     (`accelerate launch --cpu`, for one, trains without DeepSpeed whatever the config says).

Where DeepSpeed does train, `integrations/deepspeed` finds the block by itself.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from upguard_plugin.config import environment_switch
from upguard_plugin.integrations.attach import say
from upguard_plugin.integrations.deepspeed.block import KEY
from upguard_plugin.integrations.wraps import wrap


def patch(module: ModuleType) -> Callable[[], None]:
    """Look at every DeepSpeed config that is read. Returns what takes the look off again."""
    readers = _Configs()
    undo = wrap(module.HfDeepSpeedConfig, "__init__", readers.read)

    def remove() -> None:
        undo()
        atexit.unregister(readers.say_if_unused)

    return remove


class _Configs:
    def __init__(self) -> None:
        self._asked = False  # a config had the block, enabled

    def read(self, original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
        original(config, *args, **kwargs)
        content = getattr(config, "config", None)
        block = content.get(KEY) if isinstance(content, Mapping) else None
        enabled = isinstance(block, Mapping) and block.get("enabled", True) is True
        if enabled and not self._asked and environment_switch() is not False:
            self._asked = True
            atexit.register(self.say_if_unused)

    def say_if_unused(self) -> None:
        """Say that the block had no effect, where no engine was made of the config."""
        initialize = getattr(sys.modules.get("deepspeed"), "initialize", None)
        if getattr(initialize, "__upguard__", None) == "used" or os.environ.get("RANK", "0") != "0":
            return
        say(
            f'not recorded: the DeepSpeed config has a block "{KEY}", and DeepSpeed trained nothing'
        )
        say("(accelerate launch --cpu leaves DeepSpeed out); set UPGUARD=1 to record any loop")
