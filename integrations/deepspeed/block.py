"""The `"upguard"` block of a DeepSpeed config.

In:  the arguments of a call of `deepspeed.initialize`.
Out: the settings, or None where nothing switches UpGuard on. Reads, and changes nothing: DeepSpeed
     itself reads its config twice per call.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upguard_plugin.config import UpGuardConfig, environment_switch, load_config

KEY = "upguard"


def find_settings(arguments: Mapping[str, Any]) -> UpGuardConfig | None:
    """The settings that hold for a call of `initialize`; None if it is not to be recorded.

    arguments: by name, as far as they were given. Raises ConfigError for a wrong block.
    """
    config = _given_config(arguments)
    content = read_config(config)
    if KEY not in content and environment_switch() is not True:
        return None
    place = config if isinstance(config, (str, os.PathLike)) else "the DeepSpeed config"
    settings = load_config(block=content.get(KEY, {}), block_source=f'{place}, block "{KEY}"')
    return settings if settings.enabled else None


def _given_config(arguments: Mapping[str, Any]) -> Any:
    """The config where DeepSpeed looks for it."""
    for name in ("config", "config_params"):
        if arguments.get(name) is not None:
            return arguments[name]
    command_line = arguments.get("args")
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(command_line, name, None) is not None:
            return getattr(command_line, name)
    return None


def read_config(config: Any) -> Mapping[str, Any]:
    """The content of a config in any form DeepSpeed takes: dict, path, or base64 of JSON.

    Empty where it cannot be read: DeepSpeed will say so itself, and better.
    """
    if isinstance(config, Mapping):
        return config
    try:
        if os.path.exists(config):  # noqa: PTH110 (a long base64 text makes Path.exists raise)
            content = _loads(Path(config).read_text(encoding="utf-8"))
        else:
            content = _loads(base64.urlsafe_b64decode(config).decode("utf-8"))
    except (OSError, TypeError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _loads(text: str) -> Any:
    try:
        import hjson  # optional: newer DeepSpeed reads JSON with comments, and brings this along
    except ImportError:
        return json.loads(text)
    return hjson.loads(text)
