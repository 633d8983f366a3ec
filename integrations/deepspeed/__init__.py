"""DeepSpeed: a block `"upguard": {...}` in its JSON config, or UPGUARD=1, records the engine."""

from __future__ import annotations

from upguard_plugin.integrations.deepspeed.seam import patch

__all__ = ["patch"]
