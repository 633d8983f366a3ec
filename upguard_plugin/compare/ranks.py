"""From each rank's first divergence to those of the whole run.

In:  the `RankFacts` of all compared ranks, and who can tell more of their events.
Out: `Origins`: boundaries where the runs part, in order, each with the ranks that agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from upguard_plugin.compare.clock import RankMessages, minimal_ranks
from upguard_plugin.compare.facts import Name, RankFacts, Sighting

MAX_ORIGINS = 20  # origins that a verdict lists; the others are counted in a note


@dataclass(frozen=True, slots=True)
class Origin:
    """One boundary where runs part, first on these ranks."""

    seen: Sighting  # on the lowest of the ranks
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origins:
    """All of a run, in the order of a step."""

    minimal: tuple[Origin, ...]
    per_rank: tuple[Origin, ...]  # one per rank that differs, rank by rank
    num_more: int  # minimal ones beyond MAX_ORIGINS

    def in_order(self) -> list[Origin]:
        """Those of `per_rank`, the earliest first."""
        return sorted(self.per_rank, key=lambda origin: (origin.seen.step, origin.seen.order))


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of those who have the events."""

    messages: Callable[[int], Sequence[RankMessages]]  # of all ranks in a step
    sightings: Callable[[set[int]], Sequence[Sighting]]  # all of these ranks


def origins_of(facts: Sequence[RankFacts], ask: Ask) -> Origins:
    """Merge what the ranks found."""
    per_rank = {found.rank: found.first for found in facts if found.first is not None}
    if not per_rank:
        return Origins((), (), 0)
    step = min(first.step for first in per_rank.values())
    firsts = {rank: first for rank, first in per_rank.items() if first.step == step}
    minimal = _minimal(step, firsts, len(facts), ask)
    return _origins(ask.sightings(minimal), [per_rank[rank] for rank in sorted(per_rank)])


def structures_of(facts: Sequence[RankFacts]) -> Origins:
    """The first boundary of each rank that differs with no value behind it, merged like origins."""
    seen = [found.structure for found in facts if found.structure is not None]
    step = min((first.step for first in seen), default=0)
    return _origins([first for first in seen if first.step == step], seen)


def _origins(first: Sequence[Sighting], per_rank: Sequence[Sighting]) -> Origins:
    merged = _merged(first)
    return Origins(
        tuple(merged[:MAX_ORIGINS]),
        tuple(Origin(seen, (seen.rank,)) for seen in per_rank),
        max(0, len(merged) - MAX_ORIGINS),
    )


def _minimal(step: int, firsts: Mapping[int, Sighting], num_ranks: int, ask: Ask) -> set[int]:
    """Ranks whose divergence no other rank's can have caused."""
    if num_ranks == 1 or len(firsts) == 1:
        return set(firsts)
    messages = ask.messages(step)
    if any(listed.rows for listed in messages):
        return minimal_ranks(messages, {rank: first.row for rank, first in firsts.items()})
    # No message was recorded. These phases communicate, so what differs there may have come from
    # a rank that differed earlier in the step; in the phases before, nothing is known of the order.
    earlier = {rank for rank, first in firsts.items() if not first.communicated}
    return earlier or set(firsts)


def _merged(sightings: Sequence[Sighting]) -> list[Origin]:
    """One origin per boundary, with all its ranks, in the order of a step."""
    by_boundary: dict[Name, list[Sighting]] = {}
    for seen in sorted(sightings, key=lambda seen: seen.rank):
        by_boundary.setdefault(seen.name, []).append(seen)
    merged = []
    for members in by_boundary.values():
        # A collective that one run lacks is missed where it would have changed something.
        missed = [member for member in members if not member.idle] or members
        merged.append(Origin(missed[0], tuple(sorted({member.rank for member in missed}))))
    return sorted(merged, key=lambda origin: origin.seen.order)
