"""Who compares what: the ranks and steps of two runs, divided over the processes of a team.

In:  the ranks that both runs have, and a team.
Out: `Piece`s of ranks, scanned; together they are what one process would have found.

All ranks in a row, each as long as any other, are cut into as many equal parts as there are
processes; a cut inside a rank falls between two steps. What a step says may depend on the steps
before it only if it is not wholly equal. So all pieces of a rank are scanned at once as far as
steps are equal, and from the first other one on the process that met it goes on alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from upguard_plugin.compare.noise import RankNoise, Repeat
from upguard_plugin.compare.scan import RankScan, Request, scan_rank
from upguard_plugin.compare.steps import RankSteps
from upguard_plugin.compare.team import Team
from upguard_plugin.compare.unused import Memory

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a rank: from `start` to `stop`, in parts of `of`."""

    rank: int
    start: int
    stop: int
    of: int

    def steps(self, common: Sequence[int]) -> Sequence[int]:
        return common[len(common) * self.start // self.of : len(common) * self.stop // self.of]

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
    own: frozenset[int]  # steps of the share

    @classmethod
    def of(cls, share: Share, steps: RankSteps, noise: Sequence[Repeat], request: Request) -> Piece:
        own = share.steps(steps.common)
        before = [s for s in steps.common if own and s < own[0] and request.selection.has_step(s)]
        scan = RankScan(share.rank, steps, deque(own), Memory(is_first=not before))
        found = RankNoise(noise, share.rank, steps.space) if noise else None
        return cls(share, scan, found, frozenset(own))


@dataclass(frozen=True, slots=True)
class Pause:
    """How far a piece of a cut rank is equal."""

    rank: int
    start: int  # the piece's
    equal: tuple[int, ...]  # its steps that were looked at, and are wholly equal
    left: tuple[int, ...]


def scan_pieces(
    pieces: Sequence[Piece], request: Request, team: Team, progress: Progress
) -> list[Piece]:
    """Scan them all. Returns those that count: behind a divergence none does."""

    def scan_first() -> list[Pause]:
        for place, piece in enumerate(pieces):
            whole = piece.share.is_whole
            _run(scan_rank(piece.scan, request, piece.noise, only_equal=not whole), piece, place)
            if whole:
                piece.scan.steps.forget(piece.scan.step)
        return [_pause(piece) for piece in pieces if not piece.share.is_whole]

    def _run(scanned: Iterator[int], piece: Piece, place: int) -> None:
        for done, _ in enumerate(scanned):
            progress(place + min(done / len(piece.own), 1), len(pieces))

    pauses = team.share(scan_first)

    def go_on() -> list[tuple[int, int]]:
        for place, piece in enumerate(pieces):
            later = _to_go_on_with(piece, pauses)
            if later is not None:
                piece.scan.todo.extend(
                    step for pause in later for step in (*pause.equal, *pause.left)
                )
                piece.scan.seen_equal = {step for pause in later for step in pause.equal}
                _run(scan_rank(piece.scan, request, piece.noise), piece, place)
        found = ((piece.share.rank, piece.scan.step) for piece in pieces)
        return [(rank, step) for rank, step in found if step is not None]

    divergent = dict(team.share(go_on))
    return [piece for piece in pieces if not _lies_behind(piece, divergent)]


def _pause(piece: Piece) -> Pause:
    left = tuple(piece.scan.todo)
    equal = tuple(sorted(piece.own.difference(left)))
    return Pause(piece.share.rank, piece.share.start, equal, left)


def _to_go_on_with(piece: Piece, pauses: Sequence[Pause]) -> list[Pause] | None:
    """The pieces behind this one, if it is the first of its rank that paused."""
    if piece.share.is_whole:
        return None
    mine = sorted(
        (pause for pause in pauses if pause.rank == piece.share.rank), key=lambda pause: pause.start
    )
    stopped = [pause for pause in mine if pause.left]
    if not stopped or stopped[0].start != piece.share.start:
        return None
    return mine[mine.index(stopped[0]) + 1 :]


def _lies_behind(piece: Piece, divergent: dict[int, int]) -> bool:
    step = divergent.get(piece.share.rank)
    return step is not None and piece.scan.step is None and step < min(piece.own, default=step)
