"""Functions of a framework, replaced by ones that also tell us: what every adapter begins with."""

from __future__ import annotations

from upguard_plugin.capture.wraps import wrap

__all__ = ["wrap"]
