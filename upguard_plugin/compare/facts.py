"""What one process must know of a rank that another one compared: small, and without events.

In:  a rank's scan.
Out: `RankFacts`, and `Sighting`s: findings with what is needed to order and merge them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from upguard_plugin.compare.clock import COMMUNICATING_PHASES
from upguard_plugin.compare.evidence import is_idle
from upguard_plugin.compare.findings import Finding
from upguard_plugin.compare.keys import PHASE_NUMBER
from upguard_plugin.compare.origin import origin_of
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.scan import RankScan
from upguard_plugin.compare.steps import RankSteps
from upguard_plugin.compare.unused import Aside

COUNTS = (
    "certified",
    "compared",
    "differ",
    "unmatched_baseline",
    "unmatched_target",
    "not_comparable",
    "tainted",
    "filtered",
    "noise",
    "common_boundaries",
)


@dataclass(frozen=True, slots=True)
class Name:
    """A boundary as all ranks know it."""

    phase: str
    microbatch: int
    boundary: str
    role: str
    slot: str
    call: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A finding on one rank."""

    process: int  # that has the events
    rank: int
    step: int
    target_step: int  # the same step in the target's numbering
    finding: Finding
    name: Name
    row: int  # where the rank differs, in rows of its baseline events
    idle: bool = False  # a collective of one run only, which left the rank's buffers as they were

    @property
    def communicated(self) -> bool:
        """Whether it lies in a phase in which ranks exchange values."""
        return self.name.phase in COMMUNICATING_PHASES

    @property
    def order(self) -> tuple[int, ...]:
        """Order inside a step: start, data, micro-batches as they run, the phases behind them."""
        phase = self.name.phase
        part = 0 if phase == "start" else 2 if self.communicated else 1
        number = PHASE_NUMBER[phase]
        if phase in ("recompute", "accumulate"):
            number = PHASE_NUMBER["backward"]  # they run inside of backward
        microbatch = self.name.microbatch if part == 1 else 0
        return (part, microbatch, number, self.finding.place, self.rank)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the comparison of one rank, or of a piece of it, found."""

    rank: int
    place: int  # of the piece in its rank
    counts: Mapping[str, int]
    first: Sighting | None  # where the rank differs first
    structure: Sighting | None  # where boundaries differ first without a value behind them
    last_equal: tuple[int, int, int] | None  # step, baseline row and process
    unused: Mapping[Aside, int]  # what differs in vain -> first step
    ignored: Mapping[int, int]  # place of an ignore rule -> events
    noisy: Mapping[str, int]  # what is noise -> first step
    renumbered: tuple[int, int] | None  # first step in the baseline's numbers and the target's
    reasons: tuple[str, ...]  # why equal events do not prove equal ranks

    @property
    def step(self) -> int | None:
        """The divergent step."""
        return None if self.first is None else self.first.step


def facts_of(scan: RankScan, place: int, process: int, reasons: Sequence[str]) -> RankFacts:
    first = None
    if scan.step is not None:
        first = _sighting(scan, process, scan.step, _origin(scan, scan.findings[0]))
    structure = None
    if scan.structure is not None:
        structure = _sighting(scan, process, *scan.structure)
    last = scan.last_equal
    return RankFacts(
        rank=scan.rank,
        place=place,
        counts={name: getattr(scan, name) for name in COUNTS},
        first=first,
        structure=structure,
        last_equal=None if last is None else (*last, process),
        unused=scan.unused,
        ignored=scan.ignored,
        noisy=scan.noisy,
        renumbered=scan.steps.first_pair,
        reasons=tuple(reasons),
    )


def sightings_of(scan: RankScan, process: int) -> list[Sighting]:
    """All findings of the divergent step, at the boundaries that made them."""
    if scan.step is None:
        return []
    return [
        _sighting(scan, process, scan.step, _origin(scan, finding)) for finding in scan.findings
    ]


def _sighting(scan: RankScan, process: int, step: int, finding: Finding) -> Sighting:
    pairing, target_step = pairing_of(scan.steps, step), scan.steps.partner(step)
    assert target_step is not None
    key = finding.key(pairing)
    side, seen = finding.seen_by(pairing)
    row = finding.baseline_row
    return Sighting(
        process=process,
        rank=scan.rank,
        step=step,
        target_step=target_step,
        finding=finding,
        name=Name(
            key.phase,
            int(side.batch.microbatch[seen]),
            key.boundary,
            key.role,
            key.slot,
            int(side.batch.call[seen]),
        ),
        row=(finding.place & ((1 << 40) - 1)) // 2 if row is None else row,
        idle=finding.what == "alone" and is_idle(side, seen),
    )


def pairing_of(steps: RankSteps, step: int) -> Pairing:
    pairing = steps.pairing(step)
    assert pairing is not None
    return pairing


def _origin(scan: RankScan, finding: Finding) -> Finding:
    assert scan.step is not None and scan.chosen is not None
    return origin_of(finding, pairing_of(scan.steps, scan.step), scan.chosen)


def merged_facts(parts: Sequence[RankFacts]) -> list[RankFacts]:
    """One for each rank. Pieces of a rank are put together in their order."""
    merged: dict[int, RankFacts] = {}
    for part in sorted(parts, key=lambda part: (part.rank, part.place)):
        known = merged.get(part.rank)
        merged[part.rank] = part if known is None else _together(known, part)
    return list(merged.values())


def _together(earlier: RankFacts, later: RankFacts) -> RankFacts:
    structures = [part.structure for part in (earlier, later) if part.structure is not None]
    return replace(
        earlier,
        counts=Counter(earlier.counts) + Counter(later.counts),
        first=earlier.first or later.first,
        structure=min(structures, key=lambda found: found.step, default=None),
        last_equal=max(filter(None, (earlier.last_equal, later.last_equal)), default=None),
        unused={**later.unused, **earlier.unused},
        ignored=Counter(earlier.ignored) + Counter(later.ignored),
        noisy={**later.noisy, **earlier.noisy},
    )
