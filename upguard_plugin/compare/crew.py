"""A team at work on two runs: who has which events, and who is asked about them.

In:  two runs, the ranks to compare, a team.
Out: facts, messages, sightings and divergences of all ranks, the same on every process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from upguard_plugin.compare.causes import Cause
from upguard_plugin.compare.clock import RankMessages, messages_of
from upguard_plugin.compare.describe import divergence
from upguard_plugin.compare.dumped import elements_of
from upguard_plugin.compare.evidence import Scene
from upguard_plugin.compare.facts import (
    RankFacts,
    Sighting,
    facts_of,
    merged_facts,
    pairing_of,
    sightings_of,
)
from upguard_plugin.compare.keys import KeySpace
from upguard_plugin.compare.layouts.logical import LogicalRun
from upguard_plugin.compare.noise import Repeat
from upguard_plugin.compare.obstacles import missing_steps
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.pieces import Piece, Progress, Share, Work, scan_pieces, shares_of
from upguard_plugin.compare.ranks import Origin
from upguard_plugin.compare.references import event_ref
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import RankScan, Request
from upguard_plugin.compare.spread import spread_of
from upguard_plugin.compare.steps import Judge, RankSteps, as_it_is, steps_behind
from upguard_plugin.compare.team import Team
from upguard_plugin.trace.step_table import StepTable
from upguard_plugin.verdict import Divergence, Spread
from upguard_plugin.verdict_parts import EventRef

_MOST_KEPT = 2_000_000  # events of both runs that stay in memory, some 130 bytes each


class Crew:
    """One process of the team, with the pieces that it compares."""

    def __init__(
        self,
        baseline: Run,
        target: Run,
        ranks: Sequence[int],
        team: Team,
        judge: Judge = as_it_is,
    ) -> None:
        self._judge = judge
        self._runs = (baseline, target)
        self._ranks = ranks
        self._team = team
        self._space = KeySpace()  # one for all ranks: most of them have the same keys
        self._pieces: dict[int, Piece] = {}  # by rank
        self._divergent: dict[int, int] = {}  # rank -> step
        self._kept: OrderedDict[int, int] = (
            OrderedDict()
        )  # rank -> events in memory; used last: end
        self._num_kept = 0  # events of these

    def scan(
        self, request: Request, noise: Sequence[Repeat], progress: Progress
    ) -> list[RankFacts]:
        """Compare all ranks; one answer per rank."""
        team, lag = self._team, self._lag()
        told: list[RankFacts] = []

        def opened(share: Share) -> Piece:
            steps = RankSteps(*self._runs, share.rank, lag, self._space, self._judge)
            piece = self._pieces[share.rank] = Piece.of(share, steps, noise, request)
            return piece

        def done(piece: Piece) -> None:
            told.append(self._facts_of(piece, request))
            self._used(piece)

        shares = shares_of(self._ranks, team.index, team.size)
        scan_pieces(Work(shares, opened, done, progress), request, team)
        found = merged_facts(team.share(lambda: told))
        self._divergent = {part.rank: part.step for part in found if part.step is not None}
        return found

    def num_events_of_others(self, run: Run) -> int:
        """Events of the run on ranks that are not compared."""
        compared = set(self._ranks)
        others = [rank for rank in run.ranks if rank not in compared]
        mine = others[self._team.index :: self._team.size]
        return sum(
            self._team.share(
                lambda: [int(StepTable.of(run.steps(r)).num_events.sum()) for r in mine]
            )
        )

    def messages(self, step: int) -> list[RankMessages]:
        """What all ranks that have the step gave to each other in it."""
        return self._team.share(
            lambda: [
                messages_of(rank, self._pairing(rank, step).baseline)
                for rank, piece in self._pieces.items()
                if self._tells_of(piece, step)
            ]
        )

    def sightings(self, ranks: set[int]) -> list[Sighting]:
        """All findings of these ranks in their divergent steps."""
        return self._team.share(
            lambda: [
                seen
                for rank, piece in self._pieces.items()
                if rank in ranks
                for seen in sightings_of(self._used(piece), self._team.index)
            ]
        )

    def described(
        self, origins: Sequence[Origin], decide: Callable[[Scene], Cause], one_program: bool
    ) -> list[Divergence]:
        """Each origin with its cause."""
        mine = [
            (place, origin)
            for place, origin in enumerate(origins)
            if origin.seen.process == self._team.index
        ]
        found = self._team.share(
            lambda: [(place, self._described(o, decide, one_program)) for place, o in mine]
        )
        return [told for _, told in sorted(found, key=lambda item: item[0])]

    def spread(self, origins: Sequence[Origin]) -> list[Spread]:
        """How the difference spread from each origin on the rank where it was seen."""

        def followed() -> list[tuple[int, Spread]]:
            return [
                (place, self._spread(origin))
                for place, origin in enumerate(origins)
                if origin.seen.process == self._team.index
            ]

        found = self._team.share(followed)
        return [told for _, told in sorted(found, key=lambda item: item[0])]

    def event(self, rank: int, step: int, row: int, process: int) -> EventRef:
        """One event of the baseline, which this process has read."""

        def refer() -> list[EventRef]:
            if process != self._team.index:
                return []
            pairing = self._pairing(rank, step)
            return [event_ref(pairing.baseline.batch, row, rank)]

        return self._team.share(refer)[0]

    def _pairing(self, rank: int, step: int) -> Pairing:
        found = pairing_of(self._pieces[rank].scan.steps, step)
        self._used(self._pieces[rank])
        return found

    def _used(self, piece: Piece) -> RankScan:
        """Its scan. What other ranks read and nobody used for long is freed, to be read again."""
        rank = piece.share.rank
        self._num_kept -= self._kept.pop(rank, 0)
        self._kept[rank] = piece.scan.steps.num_kept_events
        self._num_kept += self._kept[rank]
        while self._num_kept > _MOST_KEPT and len(self._kept) > 1:
            oldest, num_events = self._kept.popitem(last=False)
            self._num_kept -= num_events
            self._pieces[oldest].scan.steps.forget(None)
        return piece.scan

    def _lag(self) -> int:
        """How many steps the target lags behind: a matter of the whole run."""
        first = self._ranks[:1] if self._team.index == 0 else []
        return sum(self._team.share(lambda: [steps_behind(*self._runs, rank) for rank in first]))

    def _facts_of(self, piece: Piece, request: Request) -> RankFacts:
        reasons = []
        if piece.share.start == 0:
            reasons = missing_steps(*self._runs, request.selection, piece.scan.steps)
        return facts_of(piece.scan, piece.share.start, self._team.index, reasons)

    def _tells_of(self, piece: Piece, step: int) -> bool:
        """Whether it is this process that has the step of the piece's rank."""
        if self._divergent.get(piece.share.rank) == step:
            return piece.scan.step == step
        return step in piece.own

    def _spread(self, origin: Origin) -> Spread:
        seen, scan = origin.seen, self._pieces[origin.seen.rank].scan
        pairing = self._pairing(seen.rank, seen.step)
        assert scan.chosen is not None
        return spread_of(seen.rank, seen.step, seen.finding, pairing, scan.chosen)

    def _described(
        self, origin: Origin, decide: Callable[[Scene], Cause], one_program: bool
    ) -> Divergence:
        seen = origin.seen
        steps = self._pieces[seen.rank].scan.steps
        world_size = max(run.manifest.world_size for run in self._runs)
        across_layouts = isinstance(self._runs[0], LogicalRun)
        pairing = self._pairing(seen.rank, seen.step)
        scene = Scene(
            steps, seen.step, pairing, seen.finding, world_size, one_program, across_layouts
        )
        elements = elements_of(self._runs, seen.rank, pairing, seen.finding)
        return divergence(origin, scene, decide(scene), elements)
