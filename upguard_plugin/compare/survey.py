"""What every process must know of every rank, read once by one of them.

In:  a run whose ranks are listed, and a team.
Out: the same run, of which is known who recorded something, and each rank's layout and end.

So each process looks at the directories of its own ranks only, and at each small file once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from upguard_plugin.compare.pieces import shares_of
from upguard_plugin.compare.run import Run, RunView
from upguard_plugin.compare.team import Team
from upguard_plugin.records import Layout
from upguard_plugin.trace.batch import RankEnd


@dataclass(frozen=True, slots=True)
class RankAbout:
    """How a rank sat in the mesh and how its trace ends."""

    rank: int
    layout: Layout
    end: RankEnd


def surveyed(run: Run, team: Team) -> Run:
    """Each process looks at its own ranks."""
    return SurveyedRun(
        run,
        team.share(
            lambda: [
                RankAbout(rank, run.layout(rank), run.end(rank))
                for rank in _own_listed(run, team)
                if run.has_trace(rank)
            ]
        ),
    )


def own_ranks(run: Run, team: Team) -> list[int]:
    """Those of a surveyed run that this process has looked at."""
    return [rank for rank in _own_listed(run, team) if run.has_trace(rank)]


def _own_listed(run: Run, team: Team) -> list[int]:
    """The ranks whose beginning the process would compare."""
    shares = shares_of(run.listed_ranks, team.index, team.size)
    return [share.rank for share in shares if share.start == 0]


class SurveyedRun(RunView):
    """A run of which all ranks' layouts and ends are known."""

    def __init__(self, run: Run, about: Iterable[RankAbout]) -> None:
        super().__init__(run)
        self._about = {known.rank: known for known in about}
        self._ranks = tuple(self._about)
        self._missing_ranks = run.manifest.missing_ranks(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return self._missing_ranks

    def has_trace(self, rank: int) -> bool:
        return rank in self._about

    def layout(self, rank: int) -> Layout:
        return self._about[rank].layout

    def end(self, rank: int) -> RankEnd:
        return self._about[rank].end
