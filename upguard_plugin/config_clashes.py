"""Settings that are right by themselves and impossible together.

In:  all settings, parsed.
Out: the first impossible combination, or None.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upguard_plugin.config_values import cut, range_pairs, shown


@dataclass(frozen=True, slots=True)
class Clash:
    """Settings that are right by themselves and impossible together."""

    keys: tuple[str, ...]
    sentence: str


def clash_of(settings: Mapping[str, Any]) -> Clash | None:
    """The first impossible combination among parsed settings (all fields), if any."""
    steps, interval, dump = settings["steps"], settings["interval"], settings["dump"]
    if not _meet(steps, None, interval):
        return Clash(("steps", "interval"), f"steps {cut(steps)} holds no multiple of {interval}")
    if dump is not None and not _meet(steps, dump.steps, interval):
        sentence = f"dump asks for steps {cut(dump.steps)}, none of which is recorded"
        return Clash(("dump", "steps", "interval"), sentence)
    modules = settings["modules"]
    for glob in modules:
        if f"!{glob}" in modules:
            return Clash(("modules",), f"modules includes and excludes {shown(glob)}")
    if settings["level"] == "stage" and settings["weights_in_use"] == "all":
        sentence = "weights_in_use = 'all' needs modules, which level 'stage' does not record"
        return Clash(("weights_in_use", "level"), sentence)
    return None


def _meet(one: str | None, other: str | None, interval: int) -> bool:
    """Whether some multiple of `interval` lies in both."""
    everything = ((0, sys.maxsize),)
    for a in everything if one is None else range_pairs(one):
        for b in everything if other is None else range_pairs(other):
            first, last = max(a[0], b[0]), min(a[1], b[1])
            if -(-first // interval) * interval <= last:
                return True
    return False
