"""The invariants that one rank can check alone, while it trains.

In:  the rank's batches, as they are written.
Out: one sentence for each place where an invariant broke first.

Nothing is communicated: what must agree between ranks is checked afterwards, by `upguard check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from upguard_plugin.invariants.catalogue import every_invariant
from upguard_plugin.invariants.events import KeyTables, RankEvents, StepEvents
from upguard_plugin.invariants.findings import Break, Findings, Invariant, in_order
from upguard_plugin.records import Layout
from upguard_plugin.trace.batch import EventBatch


def _alone() -> list[tuple[Invariant, Findings]]:
    return [(one, Findings(one.name)) for one in every_invariant() if one.needs_one_rank]


@dataclass(slots=True)
class OnlineCheck:
    """Looks at every `interval`-th step of one rank."""

    rank: int
    layout: Layout
    level: str
    interval: int
    _found: list[tuple[Invariant, Findings]] = field(default_factory=_alone)
    _tables: KeyTables = field(default_factory=KeyTables)

    def look(self, batch: EventBatch) -> list[str]:
        """What broke in this step and in none before, in order."""
        if batch.step % self.interval:
            return []
        events = RankEvents(self.rank, self.layout, batch, self._tables, self.level)
        step = StepEvents(batch.step, {self.rank: events})
        new: list[Break] = []
        for invariant, findings in self._found:
            known = set(findings.broken)
            invariant.look(step, findings)
            new += [one for place, one in findings.broken.items() if place not in known]
        return [_sentence(one) for one in in_order(new)]


def _sentence(found: Break) -> str:
    place = found.place
    microbatch = "" if place.microbatch is None else f", micro-batch {place.microbatch}"
    return (
        f"BROKEN at step {place.step}{microbatch}, {place.phase}, rank {found.ranks[0]}: "
        f"{found.invariant}: {found.sentence}"
    )
