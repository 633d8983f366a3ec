"""Hooks on modules."""
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


class ModuleProbe:
    """Watches modules."""
    def __init__(self, guard: Guard) -> None: ...
    def attach(self) -> None: ...
    def detach(self) -> None: ...
