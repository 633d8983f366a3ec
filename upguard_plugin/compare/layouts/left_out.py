"""What is not compared across layouts: why, and how far apart it is where sketches can tell.

In:  for each pair of steps the names that are left out, with their reasons, and the merged steps.
Out: `LeftOut`: counts by reason, and for each boundary the largest distance that was seen.

A distance explains, it never decides: what is left out is not known to be the same thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.layouts.merge import LogicalStep
from upguard_plugin.compare.layouts.names import About, Name
from upguard_plugin.fingerprint.sketch import EPSILON
from upguard_plugin.placement_cover import CANNOT_MERGE
from upguard_plugin.verdict import LeftOutBoundary, LeftOutEvents

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Place = tuple[str, str, str]  # reason, boundary, role

_MAX_NAMED = 5  # boundaries that a note names


@dataclass(frozen=True, slots=True, eq=False)
class LostPairs:
    """What is left out of both steps and has one shape in them."""

    places: tuple[Place, ...]
    ours: Ints  # rows of the baseline's merged step
    theirs: Ints
    epsilon: Floats  # of the coarser dtype

    @classmethod
    def of(cls, baseline: LogicalStep, target: LogicalStep, lost: Mapping[Name, str]) -> LostPairs:
        other = {about.name: row for row, about in enumerate(target.abouts)}
        found = [
            (row, other[about.name])
            for row, about in enumerate(baseline.abouts)
            if about.name in lost
            and about.name in other
            and _are_alike(about, target.abouts[other[about.name]])
        ]
        abouts = [(baseline.abouts[ours], target.abouts[theirs]) for ours, theirs in found]
        return cls(
            tuple((lost[a.name], a.key.boundary, a.key.role) for a, _ in abouts),
            np.array([ours for ours, _ in found], np.int64),
            np.array([theirs for _, theirs in found], np.int64),
            np.array([max(EPSILON[a.key.dtype], EPSILON[b.key.dtype]) for a, b in abouts]),
        )

    def in_eps(self, baseline: LogicalStep, target: LogicalStep) -> Floats:
        """How far apart they are in these steps; NaN where nothing tells."""
        numbers = baseline.number[self.ours], target.number[self.theirs]
        difference, norm = np.abs(numbers[0] - numbers[1]), np.abs(numbers[0])
        sketches = _sketches(baseline, self.ours), _sketches(target, self.theirs)
        if sketches[0].shape == sketches[1].shape and sketches[0].size:
            by_sketch = np.isnan(difference)
            apart = np.linalg.norm(sketches[0] - sketches[1], axis=1)
            difference[by_sketch] = apart[by_sketch]
            norm[by_sketch] = np.linalg.norm(sketches[0], axis=1)[by_sketch]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(difference == 0, 0.0, difference / norm)
        in_eps: Floats = np.where(np.isfinite(share), share, np.nan) / self.epsilon
        return in_eps


@dataclass(slots=True)
class LeftOut:
    """What was not compared, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    # By reason, in order; with the largest distance in epsilons, NaN where none is known.
    boundaries: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Mapping[Name, str]) -> LeftOut:
        found = cls()
        for ((_, boundary, role, *_), *_), reason in names.items():
            found.counts[reason] += 1
            found.boundaries.setdefault(reason, {})[boundary, role] = np.nan
        return found

    def add(self, other: LeftOut) -> None:
        """Count what was left out of one more step."""
        self.counts.update(other.counts)
        for reason, boundaries in other.boundaries.items():
            known = self.boundaries.setdefault(reason, {})
            for boundary in boundaries:
                known.setdefault(boundary, np.nan)

    def measure(self, pairs: LostPairs, baseline: LogicalStep, target: LogicalStep) -> None:
        """Look how far apart it is in one more step, which was added."""
        distances = pairs.in_eps(baseline, target).tolist()
        for (reason, *boundary), distance in zip(pairs.places, distances, strict=True):
            known = self.boundaries[reason]
            known[boundary[0], boundary[1]] = np.fmax(known[boundary[0], boundary[1]], distance)

    def holes(self) -> list[str]:
        """What a run's own record lacks or has twice: no layout explains it."""
        found = [reason for reason in self.counts if reason.startswith(CANNOT_MERGE)]
        if not found:
            return []
        count = sum(self.counts[reason] for reason in found)
        return [f"{count} {'event' if count == 1 else 'events'} not comparable: {found[0]}"]

    def notes(self) -> list[str]:
        """One sentence per reason, with the first boundaries it concerns."""
        notes = []
        for reason, count in self.counts.most_common():
            names = [
                f"{boundary} ({role}{_apart(distance)})"
                for (boundary, role), distance in self.boundaries[reason].items()
            ]
            more = "" if len(names) <= _MAX_NAMED else f" and {len(names) - _MAX_NAMED} more"
            notes.append(
                f"not compared: {count} events, {reason}: {', '.join(names[:_MAX_NAMED])}{more}"
            )
        return notes

    def listed(self) -> list[LeftOutEvents]:
        """All of it, for the verdict."""
        return [
            LeftOutEvents(
                reason=reason,
                events=count,
                boundaries=[
                    LeftOutBoundary(
                        boundary=boundary,
                        role=role,
                        largest_in_eps=None if np.isnan(distance) else float(distance),
                    )
                    for (boundary, role), distance in self.boundaries[reason].items()
                ],
            )
            for reason, count in self.counts.most_common()
        ]


def _sketches(step: LogicalStep, rows: Ints) -> Floats:
    """[rows, K]; K is 0 where none were recorded."""
    return np.zeros((len(rows), 0)) if step.sketch is None else step.sketch[rows]


def _are_alike(ours: About, theirs: About) -> bool:
    """Whether their elements lie at the same places, so that sketches can be compared."""
    if ours.key.shape != theirs.key.shape:
        return False
    if ours.dims != theirs.dims and sorted(ours.dims) == sorted(theirs.dims):
        return False  # transposed
    return ours.key.dtype in EPSILON and theirs.key.dtype in EPSILON


def _apart(distance: float) -> str:
    return "" if np.isnan(distance) else f", {distance:.3g} epsilons apart"
