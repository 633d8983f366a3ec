"""A team at work on two runs: who has which events, and who is asked about them.

In:  two runs, the ranks to compare, a team.
Out: facts, messages, sightings and divergences of all ranks, the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upguard_plugin.compare.causes import Cause
from upguard_plugin.compare.clock import RankMessages, messages_of
from upguard_plugin.compare.describe import divergence, event_ref
from upguard_plugin.compare.evidence import Scene
from upguard_plugin.compare.facts import (
    RankFacts,
    Sighting,
    facts_of,
    merged_facts,
    pairing_of,
    sightings_of,
)
from upguard_plugin.compare.layouts.logical import LogicalRun
from upguard_plugin.compare.obstacles import missing_steps
from upguard_plugin.compare.pieces import Piece, Progress, scan_pieces, shares_of
from upguard_plugin.compare.ranks import Origin
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import Request
from upguard_plugin.compare.steps import Judge, RankSteps, as_it_is, steps_behind
from upguard_plugin.compare.team import Team
from upguard_plugin.verdict import Divergence, EventRef


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
        self._pieces: dict[int, Piece] = {}  # by rank
        self._divergent: dict[int, int] = {}  # rank -> step

    def scan(self, request: Request, noise: Sequence[Run], progress: Progress) -> list[RankFacts]:
        """Compare all ranks; one answer per rank."""
        team = self._team
        lag = self._lag()

        def open_pieces() -> list[None]:
            for share in shares_of(self._ranks, team.index, team.size):
                steps = RankSteps(*self._runs, share.rank, lag, judge=self._judge)
                self._pieces[share.rank] = Piece.of(share, steps, noise, request)
            return []

        team.share(open_pieces)
        kept = scan_pieces(list(self._pieces.values()), request, team, progress)
        found = merged_facts(team.share(lambda: [self._facts_of(piece, request) for piece in kept]))
        self._divergent = {part.rank: part.step for part in found if part.step is not None}
        return found

    def num_events_of_others(self, run: Run) -> int:
        """Events of the run on ranks that are not compared."""
        others = [rank for rank in run.ranks if rank not in self._ranks]
        mine = others[self._team.index :: self._team.size]
        return sum(
            self._team.share(lambda: [entry.num_events for r in mine for entry in run.steps(r)])
        )

    def messages(self, step: int) -> list[RankMessages]:
        """What all ranks that have the step gave to each other in it."""
        return self._team.share(
            lambda: [
                messages_of(rank, pairing_of(piece.scan.steps, step).baseline)
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
                for seen in sightings_of(piece.scan, self._team.index)
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

    def event(self, rank: int, step: int, row: int, process: int) -> EventRef:
        """One event of the baseline, which this process has read."""

        def refer() -> list[EventRef]:
            if process != self._team.index:
                return []
            pairing = pairing_of(self._pieces[rank].scan.steps, step)
            return [event_ref(pairing.baseline.batch, row, rank)]

        return self._team.share(refer)[0]

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

    def _described(
        self, origin: Origin, decide: Callable[[Scene], Cause], one_program: bool
    ) -> Divergence:
        seen = origin.seen
        steps = self._pieces[seen.rank].scan.steps
        world_size = max(run.manifest.world_size for run in self._runs)
        across_layouts = isinstance(self._runs[0], LogicalRun)
        pairing = pairing_of(steps, seen.step)
        scene = Scene(
            steps, seen.step, pairing, seen.finding, world_size, one_program, across_layouts
        )
        return divergence(origin, scene, decide(scene))
