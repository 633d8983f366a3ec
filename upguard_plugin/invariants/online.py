"""The invariants that one rank can check alone, while it trains.

In:  the rank's batches, as they are written.
Out: one sentence for each place where an invariant broke first.

Nothing is communicated: what must agree between ranks is checked afterwards, by `upguard check`.
Those that compare steps with earlier ones look at every step, whatever the interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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
        is_due = batch.step % self.interval == 0
        events = RankEvents(self.rank, self.layout, batch, self._tables, self.level)
        step = StepEvents(batch.step, {self.rank: events})
        new: list[Break] = []
        for invariant, findings in self._found:
            if is_due or invariant.remembers:
                new += _new(findings, partial(invariant.look, step))
        return [_sentence(one) for one in in_order(new)]

    def finish(self) -> list[str]:
        """What only the whole run could tell, in order."""
        new = [
            one for invariant, findings in self._found for one in _new(findings, invariant.finish)
        ]
        return [_sentence(one) for one in in_order(new)]


def _new(findings: Findings, look: Callable[[Findings], None]) -> list[Break]:
    known = set(findings.broken)
    look(findings)
    return [one for place, one in findings.broken.items() if place not in known]


def _sentence(found: Break) -> str:
    place = found.place
    microbatch = "" if place.microbatch is None else f", micro-batch {place.microbatch}"
    return (
        f"BROKEN at step {place.step}{microbatch}, {place.phase}, rank {found.ranks[0]}: "
        f"{found.invariant}: {found.sentence}"
    )
