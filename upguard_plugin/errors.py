"""Every exception of UpGuard, with the exit code that the `upguard` command gives for it.

A message is one sentence of what could not be done; `evidence` follows in aligned lines, then
`remedy`, what to try. Values stand with their names:

    cannot compare runs/target: 3 of 8 rank files are missing
      found    ranks 0, 1, 2, 4, 6
      missing  ranks 3, 5, 7
      try      copy the missing files, or name the ranks to compare: --ranks 0,1,2,4,6
"""

from __future__ import annotations

from collections.abc import Mapping

EXIT_IDENTICAL = 0
EXIT_DIVERGENT = 1
EXIT_UNREADABLE = 2  # wrong usage, or input that cannot be read
EXIT_INCOMPARABLE = 3  # not comparable, or not decided


class UpGuardError(Exception):
    """Base of all errors that are the user's to mend."""

    exit_code = EXIT_UNREADABLE

    def __init__(
        self, sentence: str, *, evidence: Mapping[str, object] | None = None, remedy: str = ""
    ) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.evidence = dict(evidence or {})
        self.remedy = remedy

    def __str__(self) -> str:
        rows = {key: str(value) for key, value in self.evidence.items()}
        if self.remedy:
            rows["try"] = self.remedy
        width = max((len(key) for key in rows), default=0)
        return "\n".join([self.sentence] + [f"  {k:<{width}}  {v}" for k, v in rows.items()])


class ConfigError(UpGuardError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class PlacementError(UpGuardError):
    """A placement cannot be parsed, does not fit its tensor, or parts overlap or leave a gap."""


class UnsupportedTensorError(UpGuardError):
    """A tensor has no defined bytes to fingerprint (quantised, or on a big-endian host)."""


class RunDirectoryError(UpGuardError):
    """A run directory cannot be made or used: it holds a run already, or cannot be written."""


class TraceError(UpGuardError):
    """A run cannot be read: missing, not a trace, damaged, or of a newer schema."""


class UsageError(UpGuardError):
    """The command line or an API call makes no sense."""


class IncomparableError(UpGuardError):
    """Two runs, or one run for a check, have nothing that can be decided."""

    exit_code = EXIT_INCOMPARABLE
