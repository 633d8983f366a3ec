"""Collectives and messages that some of their ranks have called, and others not yet.

In:  those of each step, in order.
Out: those that are as complete as they get; at the end of the run, what was left alone.

Ranks number what they call by themselves. Whoever is behind in one step may catch up in a later one
(a rank that leaves one out is behind by one from then on); whoever has a higher number has called
this one too, whatever the trace holds of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from upguard_plugin.invariants.events import RankEvents, StepEvents
from upguard_plugin.invariants.wires import Exchange


class Waiting:
    """Remembers from step to step. Holds the events of steps that something waits in."""

    def __init__(self) -> None:
        self._open: dict[tuple[Hashable, int], Exchange] = {}
        self._absent: dict[tuple[Hashable, int], frozenset[int]] = {}
        self._highest: dict[tuple[int, Hashable], int] = {}
        self._incomplete: set[int] = set()  # ranks whose trace lacks rows

    def joined(self, step: StepEvents, exchanges: Iterable[Exchange]) -> Iterator[Exchange]:
        """Those that all ranks of the step that belong to them have called by now."""
        self._incomplete.update(events.rank for events in step if _has_gaps(events))
        for exchange in exchanges:
            name = (exchange.stream, exchange.number)
            for rank in exchange.parts:
                known = self._highest.get((rank, exchange.stream), exchange.number)
                self._highest[rank, exchange.stream] = max(known, exchange.number)
            earlier = self._open.pop(name, None)
            if earlier is not None:
                exchange.parts = {**earlier.parts, **exchange.parts}
            present = step.ranks.keys() | exchange.parts.keys()
            absent = frozenset(exchange.members) & present - exchange.parts.keys()
            if absent:
                self._open[name], self._absent[name] = exchange, absent
            else:
                yield exchange

    def left(self) -> Iterator[tuple[Exchange, list[int]]]:
        """What is left, with the ranks that surely never called it."""
        for name, exchange in self._open.items():
            yield exchange, [r for r in sorted(self._absent[name]) if self._is_behind(r, exchange)]

    def _is_behind(self, rank: int, exchange: Exchange) -> bool:
        highest = self._highest.get((rank, exchange.stream), -1)
        return rank not in self._incomplete and highest < exchange.number


def _has_gaps(events: RankEvents) -> bool:
    """Whether rows were left out: buffers of works that were not seen to end."""
    seq = events.batch.seq
    return len(seq) > 0 and int(seq[-1] - seq[0]) + 1 != len(seq)
