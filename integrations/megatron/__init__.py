"""Megatron-Core: `attach` for loops of your own, `--upguard` flags or UPGUARD=1 for Megatron-LM.

Imported with every Megatron program that torch's entry point sees, so it loads nothing but itself:
the adapter and capture are loaded when something is recorded.
"""

from __future__ import annotations

from upguard_plugin.integrations.megatron.arguments import add_upguard_args
from upguard_plugin.integrations.megatron.attach import attach
from upguard_plugin.integrations.megatron.seam import patch

__all__ = ["add_upguard_args", "attach", "patch"]
