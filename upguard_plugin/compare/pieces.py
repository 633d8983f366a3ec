"""Who compares what: the ranks and steps of two runs, divided over the processes of a team.

In:  the ranks that both runs have, and a team.
Out: `Piece`s of ranks, scanned; together they are what one process would have found.

All ranks in a row, each as long as any other, are cut into as many equal parts as there are
processes; a cut inside a rank falls between two steps. What a step says may depend on the steps
before it only if it is not wholly equal. So all pieces of a rank are scanned at once as far as
steps are equal, and from the first other one on the process that met it goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.noise import RankNoise
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import RankScan, Request, scan_rank
from upguard_plugin.compare.steps import RankSteps
from upguard_plugin.compare.team import Team
from upguard_plugin.compare.unused import Memory

Ints = npt.NDArray[np.int64]
Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a rank: from `start` to `stop`, in parts of `of`."""

    rank: int
    start: int
    stop: int
    of: int

    def part_of(self, num_steps: int) -> slice:
        """Which of a rank's steps it has."""
        return slice(num_steps * self.start // self.of, num_steps * self.stop // self.of)

    @property
    def is_whole(self) -> bool:
        return (self.start, self.stop) == (0, self.of)


def shares_of(ranks: Sequence[int], index: int, size: int) -> list[Share]:
    """What process `index` of `size` compares."""
    first, last = index * len(ranks), (index + 1) * len(ranks)  # where each rank is `size` long
    return [
        Share(rank, max(first - begin, 0), min(last - begin, size), size)
        for begin, rank in zip(range(0, size * len(ranks), size), ranks, strict=True)
        if first < begin + size and begin < last
    ]


@dataclass(slots=True)
class Piece:
    """A share of a rank, being compared."""

    share: Share
    scan: RankScan
    noise: RankNoise | None

    @classmethod
    def of(cls, share: Share, steps: RankSteps, noise: Sequence[Run], request: Request) -> Piece:
        part = share.part_of(len(steps.common))
        own, before = steps.common[part], steps.common[: part.start]
        is_first = not (len(own) and request.selection.has_steps(before).any())
        scan = RankScan(share.rank, steps, own, memory=Memory(is_first=is_first))
        found = RankNoise(steps.runs[0], noise, share.rank, steps.space) if noise else None
        return cls(share, scan, found)

    @property
    def own(self) -> Ints:
        """The steps of the share."""
        common = self.scan.steps.common
        return common[self.share.part_of(len(common))]


@dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """How far a piece of a cut rank is equal."""

    rank: int
    start: int  # the piece's
    equal: Ints  # its steps that were looked at, and are wholly equal
    left: Ints


@dataclass(frozen=True, slots=True)
class Work:
    """What one process does, and who is told of it."""

    shares: Sequence[Share]
    open: Callable[[Share], Piece]
    done: Callable[[Piece], None]  # of a piece whose result is final
    progress: Progress


def scan_pieces(work: Work, request: Request, team: Team) -> None:
    """Open and scan all pieces. Those that lie behind a divergence of their rank are not told.

    A whole rank is told, and what was read of it freed, before the next one is opened.
    """
    cut: list[Piece] = []

    def scan_first() -> list[Pause]:
        for place, share in enumerate(work.shares):
            piece = work.open(share)
            whole = share.is_whole
            run(scan_rank(piece.scan, request, piece.noise, only_equal=not whole), piece, place)
            if whole:
                work.done(piece)
                piece.scan.forget()
            else:
                cut.append(piece)
        return [_pause(piece) for piece in cut]

    def run(scanned: Iterator[int], piece: Piece, place: int) -> None:
        for _ in scanned:
            work.progress(place + piece.scan.done / len(piece.scan.todo), len(work.shares))
        work.progress(place + 1, len(work.shares))

    pauses = team.share(scan_first)

    def go_on() -> list[tuple[int, int]]:
        for piece in cut:
            later = _to_go_on_with(piece, pauses)
            if later is not None:
                scan = piece.scan
                behind = [steps for pause in later for steps in (pause.equal, pause.left)]
                scan.todo = np.concatenate([scan.todo, *behind])
                scan.seen_equal = np.concatenate([scan.seen_equal, *(p.equal for p in later)])
                run(scan_rank(scan, request, piece.noise), piece, len(work.shares) - 1)
        found = ((piece.share.rank, piece.scan.step) for piece in cut)
        return [(rank, step) for rank, step in found if step is not None]

    divergent = dict(team.share(go_on))

    def tell() -> list[None]:
        for piece in cut:
            if not _lies_behind(piece, divergent):
                work.done(piece)
        return []

    team.share(tell)


def _pause(piece: Piece) -> Pause:
    todo, done = piece.scan.todo, piece.scan.done
    return Pause(piece.share.rank, piece.share.start, todo[:done], todo[done:])


def _to_go_on_with(piece: Piece, pauses: Sequence[Pause]) -> list[Pause] | None:
    """The pieces behind this one, if it is the first of its rank that paused."""
    mine = sorted(
        (pause for pause in pauses if pause.rank == piece.share.rank), key=lambda pause: pause.start
    )
    stopped = [pause for pause in mine if len(pause.left)]
    if not stopped or stopped[0].start != piece.share.start:
        return None
    return [pause for pause in mine if pause.start > piece.share.start]


def _lies_behind(piece: Piece, divergent: dict[int, int]) -> bool:
    step = divergent.get(piece.share.rank)
    if step is None or piece.scan.step is not None or not len(piece.own):
        return False
    return step < int(piece.own[0])
