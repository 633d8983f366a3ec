"""What is compared of a pair of steps, and what is left out of both with its reason.

In:  the merged steps of both runs.
Out: `Compared`: masks of their rows, and `LeftOut` for the notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from upguard_plugin.compare.layouts.alike import NumbersApart, not_alike
from upguard_plugin.compare.layouts.held import Bools
from upguard_plugin.compare.layouts.merge import LogicalStep
from upguard_plugin.compare.layouts.names import Name
from upguard_plugin.compare.layouts.units import Units

_MAX_NAMED = 5  # boundaries that a note names


@dataclass(slots=True)
class LeftOut:
    """What was not compared, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    boundaries: dict[str, dict[str, None]] = field(default_factory=dict)  # by reason, in order

    @classmethod
    def of(cls, names: Mapping[Name, str]) -> LeftOut:
        found = cls()
        for name, reason in names.items():
            found.counts[reason] += 1
            found.boundaries.setdefault(reason, {}).setdefault(f"{name[0][1]} ({name[0][2]})")
        return found

    def add(self, other: LeftOut) -> None:
        """Count what was left out of one more step."""
        self.counts.update(other.counts)
        for reason, boundaries in other.boundaries.items():
            self.boundaries.setdefault(reason, {}).update(boundaries)

    def notes(self) -> list[str]:
        """One sentence per reason, with the first boundaries it concerns."""
        notes = []
        for reason, count in self.counts.most_common():
            names = list(self.boundaries[reason])
            more = "" if len(names) <= _MAX_NAMED else f" and {len(names) - _MAX_NAMED} more"
            notes.append(
                f"not compared: {count} events, {reason}: {', '.join(names[:_MAX_NAMED])}{more}"
            )
        return notes


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """What is compared of a pair of steps."""

    rows: tuple[Bools, Bools]  # of each step, one answer per row
    left_out: LeftOut

    @classmethod
    def of(
        cls, baseline: LogicalStep, target: LogicalStep, units: Units, numbers: NumbersApart
    ) -> Compared:
        steps = (baseline, target)
        lost = dict(baseline.lost()) | dict(target.lost())
        lost |= not_alike(baseline.events(), target.events(), lost, units, numbers)
        ours, theirs = (
            np.array([about.name not in lost for about in step.abouts], np.bool_) for step in steps
        )
        return cls((ours, theirs), LeftOut.of(lost))
