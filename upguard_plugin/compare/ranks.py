"""From each rank's first divergence to those of the whole run.

In:  the `RankScan`s of all compared ranks.
Out: `Origins`: boundaries where the runs part, in order, each with the ranks that agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upguard_plugin.compare.clock import COMMUNICATING_PHASES, has_messages, minimal_ranks
from upguard_plugin.compare.findings import Finding
from upguard_plugin.compare.keys import PHASE_NUMBER
from upguard_plugin.compare.origin import origin_of
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.scan import RankScan

MAX_ORIGINS = 20  # origins that a verdict lists; the others are counted in a note


@dataclass(frozen=True, slots=True)
class Origin:
    """One boundary where runs part, first on these ranks."""

    scan: RankScan  # of the lowest of the ranks
    step: int
    finding: Finding
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origins:
    """All of a run, in the order of a step."""

    minimal: tuple[Origin, ...]
    per_rank: tuple[Origin, ...]  # one per rank that differs, rank by rank
    num_more: int  # minimal ones beyond MAX_ORIGINS


def origins_of(scans: Sequence[RankScan]) -> Origins:
    """Merge what the ranks found."""
    differing = [scan for scan in scans if scan.step is not None]
    per_rank = {scan.rank: _first_of(scan) for scan in differing}
    if not differing:
        return Origins((), (), 0)
    step = min(origin.step for origin in per_rank.values())
    first_ranks = {rank: origin for rank, origin in per_rank.items() if origin.step == step}
    minimal = _minimal(scans, step, first_ranks)
    origins = [o for scan in differing if scan.rank in minimal for o in _all_of(scan)]
    merged = _merged(origins)
    return Origins(
        tuple(merged[:MAX_ORIGINS]),
        tuple(per_rank[rank] for rank in sorted(per_rank)),
        max(0, len(merged) - MAX_ORIGINS),
    )


def structures_of(scans: Sequence[RankScan]) -> Origins:
    """The first boundary of each rank that differs with no value behind it, merged like origins."""
    per_rank = tuple(
        Origin(scan, scan.structure[0], scan.structure[1], (scan.rank,))
        for scan in scans
        if scan.structure is not None
    )
    step = min((origin.step for origin in per_rank), default=0)
    merged = _merged([origin for origin in per_rank if origin.step == step])
    return Origins(tuple(merged[:MAX_ORIGINS]), per_rank, max(0, len(merged) - MAX_ORIGINS))


def _first_of(scan: RankScan) -> Origin:
    return _all_of(scan)[0]


def _all_of(scan: RankScan) -> list[Origin]:
    assert scan.step is not None and scan.chosen is not None
    pairing = _pairing(scan, scan.step)
    return [
        Origin(scan, scan.step, origin_of(finding, pairing, scan.chosen), (scan.rank,))
        for finding in scan.findings
    ]


def _pairing(scan: RankScan, step: int) -> Pairing:
    pairing = scan.steps.pairing(step)
    assert pairing is not None
    return pairing


def _minimal(scans: Sequence[RankScan], step: int, firsts: Mapping[int, Origin]) -> set[int]:
    """Ranks whose divergence no other rank's can have caused."""
    if len(scans) == 1 or len(firsts) == 1:
        return set(firsts)
    events = {
        scan.rank: _pairing(scan, step).baseline for scan in scans if step in scan.steps.common
    }
    if has_messages(events):
        rows = {rank: _row(origin) for rank, origin in firsts.items()}
        return minimal_ranks(events, rows)
    # No message was recorded. These phases communicate, so what differs there may have come from
    # a rank that differed earlier in the step; in the phases before, nothing is known of the order.
    earlier = {rank for rank, origin in firsts.items() if not _communicated(origin)}
    return earlier or set(firsts)


def _row(origin: Origin) -> int:
    """Where the rank differs, in rows of its baseline events."""
    if origin.finding.baseline_row is not None:
        return origin.finding.baseline_row
    return (origin.finding.place & ((1 << 40) - 1)) // 2


def _communicated(origin: Origin) -> bool:
    key = origin.finding.key(_pairing(origin.scan, origin.step))
    return key.phase in COMMUNICATING_PHASES


def _merged(origins: Sequence[Origin]) -> list[Origin]:
    """One origin per boundary, with all its ranks, in the order of a step."""
    by_boundary: dict[tuple[object, ...], list[Origin]] = {}
    for origin in origins:
        pairing = _pairing(origin.scan, origin.step)
        key = origin.finding.key(pairing)
        side, row = origin.finding.seen_by(pairing)
        name = (
            key.phase,
            int(side.batch.microbatch[row]),
            key.boundary,
            key.role,
            key.slot,
            int(side.batch.call[row]),
        )
        by_boundary.setdefault(name, []).append(origin)
    merged = [
        Origin(
            members[0].scan,
            members[0].step,
            members[0].finding,
            tuple(sorted({rank for member in members for rank in member.ranks})),
        )
        for members in by_boundary.values()
    ]
    return sorted(merged, key=_order)


def _order(origin: Origin) -> tuple[int, ...]:
    """Order inside a step: start, data, micro-batches as they run, then the phases behind them."""
    pairing = _pairing(origin.scan, origin.step)
    side, row = origin.finding.seen_by(pairing)
    phase = origin.finding.key(pairing).phase
    microbatch = int(side.batch.microbatch[row])
    part = 0 if phase == "start" else 2 if phase in COMMUNICATING_PHASES else 1
    number = PHASE_NUMBER[phase]
    if phase in ("recompute", "accumulate"):
        number = PHASE_NUMBER["backward"]  # they run inside of backward
    return (part, microbatch if part == 1 else 0, number, origin.finding.place, origin.ranks[0])
