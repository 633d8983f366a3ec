"""UpGuard: compare two training runs bit by bit and name the first operation where they differ.

    guard = upguard_plugin.enable(model, optimizer)     # before the loop
    guard.step()                                        # once per optimizer step
    guard.close()

Importing this package loads nothing else: `compare` must not pay for torch. The public names are
found on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "Guard": "upguard_plugin.capture.guard",
    "enable": "upguard_plugin.integrations.torch_native",
    "UpGuardConfig": "upguard_plugin.config",
    "UpGuardError": "upguard_plugin.errors",
}

__all__ = ["Guard", "UpGuardConfig", "UpGuardError", "__version__", "enable"]

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard
    from upguard_plugin.config import UpGuardConfig
    from upguard_plugin.errors import UpGuardError
    from upguard_plugin.integrations.torch_native import enable


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
