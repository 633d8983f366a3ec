"""Rules that leave boundaries out of a comparison, each with its reason.

ignore:
  - boundaries: ["blocks.*.drop", lr]
    roles: [output]
    reason: dropout draws other numbers on this machine
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from upguard_plugin.compare.rule_files import one_of, read_rules
from upguard_plugin.records import ROLES, EventKey

_OPTION = "--ignore"
_FIELDS = {"boundaries": True, "roles": False, "reason": True}


@dataclass(frozen=True)
class IgnoreRule:
    """Which events are left out, and why."""

    boundaries: tuple[str, ...]  # globs; a boundary below a match matches too
    roles: tuple[str, ...]  # empty: every role
    reason: str

    def matches(self, key: EventKey) -> bool:
        named = self._pattern.match(key.boundary) is not None
        return named and (not self.roles or key.role in self.roles)

    @property
    def text(self) -> str:
        of_roles = f" ({', '.join(self.roles)})" if self.roles else ""
        return f"{', '.join(self.boundaries)}{of_roles}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self.boundaries)


def pattern_of(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Matches what a glob matches, and everything below it."""
    return re.compile("|".join(fnmatch.translate(g) for glob in globs for g in (glob, f"{glob}.*")))


def read_ignore_rules(path: Path) -> tuple[IgnoreRule, ...]:
    """Raises UsageError if the file does not hold such rules."""
    return tuple(
        IgnoreRule(
            rule["boundaries"],
            tuple(
                one_of(path, _OPTION, number, "roles", role, ROLES)
                for role in rule.get("roles", ())
            ),
            " ".join(rule["reason"]),
        )
        for number, rule in enumerate(read_rules(path, _OPTION, "ignore", _FIELDS), 1)
    )
