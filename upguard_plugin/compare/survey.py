"""What every process must know of every rank, read once by one of them.

In:  a run, and who reads what of which rank.
Out: the same run, whose layouts and ends are known for all ranks without reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from upguard_plugin.compare.run import Manifest, Run
from upguard_plugin.compare.team import Team
from upguard_plugin.records import Layout
from upguard_plugin.trace.batch import EventBatch, RankEnd, StepEntry


@dataclass(frozen=True, slots=True)
class RankAbout:
    """How a rank sat in the mesh and how its trace ends."""

    rank: int
    layout: Layout
    end: RankEnd


def surveyed(run: Run, mine: Sequence[int], team: Team) -> Run:
    """mine: the ranks of the run that this process reads; each rank belongs to one process."""
    if team.size == 1:
        return run
    about = team.share(lambda: [RankAbout(r, run.layout(r), run.end(r)) for r in mine])
    return _Surveyed(run, {known.rank: known for known in about})


class _Surveyed:
    """A run of which all ranks' layouts and ends are known."""

    def __init__(self, run: Run, about: Mapping[int, RankAbout]) -> None:
        self._run = run
        self._about = about

    @property
    def path(self) -> Path:
        return self._run.path

    @property
    def manifest(self) -> Manifest:
        return self._run.manifest

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._run.ranks

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return self._run.missing_ranks

    @property
    def attempts(self) -> tuple[Path, ...]:
        return self._run.attempts

    def layout(self, rank: int) -> Layout:
        return self._about[rank].layout

    def end(self, rank: int) -> RankEnd:
        return self._about[rank].end

    def steps(self, rank: int) -> tuple[StepEntry, ...]:
        return self._run.steps(rank)

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        return self._run.read(rank, step, verify=verify)
