"""PyTorch's own parallel wrappers, optimizers and checkpoints: what any loop may use."""

from __future__ import annotations

from upguard_plugin.integrations.torch_native.adapter import enable

__all__ = ["enable"]
