"""Where UpGuard meets Megatron-LM: its `megatron.training` package."""

from __future__ import annotations

from types import ModuleType


def patch(module: ModuleType) -> None:
    """Placeholder."""
