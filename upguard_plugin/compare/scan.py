"""One rank, step by step, up to the first step where the runs part.

In:  the same rank of both runs.
Out: a `RankScan`: what was compared, what differs first, and how far everything is equal.

A step whose digests agree is equal and not decoded. Behind the first divergent step nothing is
read: there everything may differ, and nothing of it is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.findings import Finding, find, pair_places
from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER
from upguard_plugin.compare.noise import RankNoise
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.sides import Side
from upguard_plugin.compare.steps import RankSteps
from upguard_plugin.compare.unused import Aside, Memory
from upguard_plugin.records import LEVELS

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHOICES = ("modules", "roles", "weights_in_use")  # settings that choose what is recorded
_ONCE_AT_STAGE = [ROLE_NUMBER["optimizer_state"], ROLE_NUMBER["master"]]
_SAID_BY_ANY_RUN = [ROLE_NUMBER[role] for role in ("scalar", "rng", "data", "sample")]


@dataclass(frozen=True, slots=True)
class Settings:
    """How far the two runs were told to record the same."""

    coarser_level: str | None = None  # where their levels differ
    record_alike: bool = True  # the same modules and roles
    is_stage: bool = False  # states of optimizers stand where each run's recording begins

    @classmethod
    def of(cls, baseline: Run, target: Run) -> Settings:
        ours, theirs = baseline.manifest, target.manifest
        levels = {ours.level, theirs.level}
        return cls(
            None if len(levels) == 1 else min(levels, key=LEVELS.index),
            all(ours.config.get(name) == theirs.config.get(name) for name in CHOICES),
            "stage" in levels,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of every rank."""

    selection: Selection
    settings: Settings
    verify: bool = False


def _no_steps() -> Ints:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class RankScan:
    """What the comparison of one rank found."""

    rank: int
    steps: RankSteps
    todo: Ints  # steps to look at, in order
    done: int = 0  # so many of them were looked at
    memory: Memory = field(default_factory=Memory)
    seen_equal: Ints = field(default_factory=_no_steps)  # steps that were compared elsewhere
    step: int | None = None  # of the divergence
    findings: tuple[Finding, ...] = ()  # in that step: the first, and what stands beside it
    chosen: Bools | None = None  # in that step: the pairs that were asked for
    structure: tuple[int, Finding] | None = None  # first step and place where boundaries differ
    unused: dict[Aside, int] = field(default_factory=dict)  # what differs in vain -> first step
    certified: int = 0  # events before the divergence, all equal
    last_equal: tuple[int, int] | None = None  # step and baseline row of the last one
    compared: int = 0
    differ: int = 0
    unmatched_baseline: int = 0
    unmatched_target: int = 0
    not_comparable: int = 0
    tainted: int = 0  # unequal by rounding, across layouts
    filtered: int = 0
    noise: int = 0
    ignored: dict[int, int] = field(default_factory=dict)  # place of an ignore rule -> events
    noisy: dict[str, int] = field(default_factory=dict)  # what is noise -> first step
    common_boundaries: int = 0  # pairs that are more than scalars, RNG states and batches

    def forget(self) -> None:
        """Free what is not needed once all steps were looked at, or can be read again."""
        self.todo = self.seen_equal = _no_steps()
        self.done = 0
        self.steps.forget(self.step)


def scan_rank(
    scan: RankScan, request: Request, noise: RankNoise | None = None, *, only_equal: bool = False
) -> Iterator[int]:
    """Compare one rank up to its first divergent step and fill in `scan`; yields each step that
    is decoded.

    noise: of the same rank, to be left out.
    only_equal: end before the first step that is not wholly equal.
    Raises TraceError for damaged files.
    """
    passed = _passed_steps(scan, request)
    for place in [*np.flatnonzero(passed.closed).tolist(), len(scan.todo)]:
        _count_passed(scan, passed, place)
        if place == len(scan.todo):
            return
        step = int(scan.todo[place])
        yield step
        pairing = scan.steps.pairing(step, request.verify)
        assert pairing is not None
        if only_equal and not pairing.is_equal:
            return
        _compare_step(scan, step, pairing, request, noise)
        if scan.step is not None:
            return
        scan.done += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """Which steps to do need no decoding; one answer and number per step."""

    seen: Bools  # compared elsewhere
    equal: Bools  # by their digests
    closed: Bools  # neither, and asked for: to be decoded
    num_events: Ints


def _passed_steps(scan: RankScan, request: Request) -> _Passed:
    place = np.searchsorted(scan.steps.common, scan.todo)
    seen = np.isin(scan.todo, scan.seen_equal)
    chosen = request.selection.has_steps(scan.todo) & ~seen
    equal = chosen & scan.steps.has_equal_digests[place]
    if request.verify:
        equal &= False
    closed = chosen & ~equal
    closed[: scan.done] = False
    return _Passed(seen, equal, closed, scan.steps.num_events[place])


def _count_passed(scan: RankScan, passed: _Passed, stop: int) -> None:
    """Count the steps up to `stop` that are not decoded."""
    part = slice(scan.done, stop)
    seen, equal, num_events = passed.seen[part], passed.equal[part], passed.num_events[part]
    counted = int(num_events[equal].sum())
    scan.compared += counted
    scan.certified += counted
    scan.common_boundaries += counted
    scan.filtered += int(num_events[~equal & ~seen].sum())
    if (equal | seen).any():
        scan.memory = replace(scan.memory, is_first=False, generators={})
    filled = np.flatnonzero(equal & (num_events > 0))
    if len(filled):
        last = filled[-1]
        scan.last_equal = (int(scan.todo[part][last]), int(num_events[last]) - 1)
    scan.done = stop


def _compare_step(
    scan: RankScan, step: int, pairing: Pairing, request: Request, noise: RankNoise | None
) -> None:
    pairing, chosen = _restricted(scan, pairing, request.selection, request.settings)
    if noise is not None:
        pairing, chosen = _without_noise(scan, pairing, chosen, noise, step)
    found = find(pairing, chosen, scan.memory)
    for aside in found.unused:
        scan.unused.setdefault(aside, step)
    if found.structure is not None and scan.structure is None:
        scan.structure = (step, found.structure)
    _count_pairs(scan, step, pairing, chosen, found.divergent)
    if found.divergent:
        scan.step, scan.findings, scan.chosen = step, found.divergent, chosen


def _restricted(
    scan: RankScan, pairing: Pairing, selection: Selection, settings: Settings
) -> tuple[Pairing, Bools]:
    """The pairing without lonely events that nobody asked for, and which pairs are asked for."""
    chosen_b = _asked_for(pairing.baseline, selection)
    chosen_t = _asked_for(pairing.target, selection)
    chosen = chosen_b[pairing.baseline.key[pairing.baseline_rows]]
    alone_b = _wanted(pairing.baseline, pairing.baseline_alone, chosen_b, settings)
    alone_t = _wanted(pairing.target, pairing.target_alone, chosen_t, settings)
    alone_b = _without_set_up(pairing.baseline, pairing.target, alone_b)
    alone_t = _without_set_up(pairing.target, pairing.baseline, alone_t)
    scan.filtered += int((~chosen).sum())
    scan.filtered += len(pairing.baseline_alone) - len(alone_b)
    scan.filtered += len(pairing.target_alone) - len(alone_t)
    if selection.ignore:
        lonely = np.setdiff1d(pairing.target_alone, alone_t)
        _count_ignored(scan, selection, pairing.baseline, np.arange(len(pairing.baseline.batch)))
        _count_ignored(scan, selection, pairing.target, lonely)
    return replace(pairing, baseline_alone=alone_b, target_alone=alone_t), chosen


def _asked_for(side: Side, selection: Selection) -> Bools:
    """Keys of events that are to be compared. What files hold is for `upguard check` only."""
    asked: Bools = selection.has_keys(side.columns.keys) & ~side.columns.is_of_file
    return asked


def _count_ignored(scan: RankScan, selection: Selection, side: Side, rows: Ints) -> None:
    rules = selection.rules_of(side.columns.keys)[side.key[rows]]
    for place, count in zip(*np.unique(rules[rules >= 0], return_counts=True), strict=True):
        scan.ignored[int(place)] = scan.ignored.get(int(place), 0) + int(count)


def _without_noise(
    scan: RankScan, pairing: Pairing, chosen: Bools, noise: RankNoise, step: int
) -> tuple[Pairing, Bools]:
    """The pairing and the chosen pairs without what is noise in this step."""
    sides = (pairing.baseline, pairing.target)
    hidden = [noise.hides(step, side.columns)[side.key] for side in sides]
    pairs = chosen & (hidden[0][pairing.baseline_rows] | hidden[1][pairing.target_rows])
    alone_b = pairing.baseline_alone[~hidden[0][pairing.baseline_alone]]
    alone_t = pairing.target_alone[~hidden[1][pairing.target_alone]]
    scan.noise += int(pairs.sum())
    scan.noise += len(pairing.baseline_alone) - len(alone_b)
    scan.noise += len(pairing.target_alone) - len(alone_t)
    scan.noisy = dict(noise.names)
    return replace(pairing, baseline_alone=alone_b, target_alone=alone_t), chosen & ~pairs


def _wanted(side: Side, rows: Ints, chosen: Bools, settings: Settings) -> Ints:
    """Rows that were asked for and that the settings of both runs record."""
    key = side.key[rows]
    # Whether and when a run saves or loads is no part of what it computes.
    wanted: Bools = chosen[key] & (side.columns.phase[key] != PHASE_NUMBER["checkpoint"])
    if settings.coarser_level is not None or not settings.record_alike:
        # What only one run's settings record cannot be missing in the other.
        one_sided = side.columns.is_operator[key] | (settings.coarser_level == "stage")
        one_sided |= not settings.record_alike
        wanted &= ~one_sided | side.columns.is_collective[key]
    if settings.is_stage:
        wanted &= ~np.isin(side.columns.role[key], _ONCE_AT_STAGE)
    return rows[wanted]


def _without_set_up(side: Side, other: Side, rows: Ints) -> Ints:
    """Lonely rows without the collectives by which a process gets ready, where the other was."""
    if side.batch.step or not other.batch.step:
        return rows
    key, columns = side.key[rows], side.columns
    kept: Ints = rows[~columns.is_collective[key] | (columns.phase[key] != PHASE_NUMBER["start"])]
    return kept


def _count_pairs(
    scan: RankScan, step: int, pairing: Pairing, chosen: Bools, divergent: tuple[Finding, ...]
) -> None:
    scan.compared += int((chosen & pairing.comparable).sum())
    scan.not_comparable += int((chosen & ~pairing.comparable).sum())
    scan.differ += int((chosen & pairing.differs).sum())
    scan.unmatched_baseline += len(pairing.baseline_alone)
    scan.unmatched_target += len(pairing.target_alone)
    key = pairing.baseline.key[pairing.baseline_rows]
    named = ~np.isin(pairing.baseline.columns.role[key], _SAID_BY_ANY_RUN)
    scan.common_boundaries += int(named.sum())
    equal = np.flatnonzero(chosen & pairing.comparable & ~pairing.differs & ~pairing.rounds)
    rounded = np.flatnonzero(chosen & pairing.rounds)
    if divergent:
        places = pair_places(pairing)
        rounded = rounded[places[rounded] < divergent[0].place]
        equal = equal[places[equal] < divergent[0].place]
        equal = equal[np.argsort(places[equal], kind="stable")]
    scan.certified += len(equal)
    scan.tainted += len(rounded)
    if len(equal):
        scan.last_equal = (step, int(pairing.baseline_rows[equal[-1]]))
