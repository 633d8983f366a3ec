"""Faults planted below what capture watches; each function plants one and returns its undoing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FAULTS: dict[str, Callable[[Any], Callable[[], None]]] = {}
