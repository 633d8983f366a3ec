"""Two runs in, one verdict out.

In:  two runs, and what is to be compared of them.
Out: a `Verdict`. Runs that cannot be compared give one too, with the reason as its first note.

`identical` is said only if everything that was asked for was read on both sides and is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from upguard_plugin.compare.causes import Cause, cause_of, structure_of
from upguard_plugin.compare.describe import divergence, event_ref
from upguard_plugin.compare.evidence import Scene
from upguard_plugin.compare.layouts.logical import LogicalPair
from upguard_plugin.compare.obstacles import (
    NEVER_FIRED,
    differences_of_runs,
    is_same_program,
    layouts_differ,
    obstacles,
    refusal,
    scan_notes,
)
from upguard_plugin.compare.ranks import Origin, origins_of, structures_of
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import RankScan, Settings, scan_rank
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.steps import RankSteps, steps_behind
from upguard_plugin.errors import UsageError
from upguard_plugin.records import Layout
from upguard_plugin.verdict import Certified, Coverage, Divergence, RunSide, Verdict, Word

Progress = Callable[[float, int], None]


def compare_runs(
    baseline: Run,
    target: Run,
    selection: Selection | None = None,
    *,
    same_program: bool = False,
    verify: bool = False,
    progress: Progress = lambda done, total: None,
) -> Verdict:
    """Compare two runs, rank by rank, or across layouts as runs of one rank.

    same_program: take both for runs of the same program, whatever their digests say.
    verify: decode and check every step, also where digests agree.
    progress: called after each step with how many ranks are done, in fractions, and of how many.
    Raises TraceError for damaged files, UsageError for a selection that no run can satisfy.
    """
    selection = selection or Selection()
    refused = refusal(baseline, target)
    if refused:
        return _verdict(baseline, target, "incomparable", [refused])
    if layouts_differ(baseline, target):
        return _compare_logical(baseline, target, selection, same_program, verify, progress)
    return _compare(baseline, target, selection, same_program, verify, progress)


def _compare_logical(
    baseline: Run,
    target: Run,
    selection: Selection,
    same_program: bool,
    verify: bool,
    progress: Progress,
) -> Verdict:
    """Compare runs of other layouts by their logical tensors."""
    if selection.ranks is not None:
        raise UsageError(
            "--ranks cannot be used across layouts: a logical tensor is made of all ranks' parts"
        )
    pair = LogicalPair(baseline, target)
    verdict = _compare(*pair.views(), selection, same_program, verify, progress, pair.ranks_of)
    lost = pair.left_out
    count = verdict.coverage.not_comparable + lost.counts.total()
    return verdict.model_copy(
        update={
            "baseline": _side(baseline),
            "target": _side(target),
            "coverage": verdict.coverage.model_copy(
                update={
                    "not_comparable": count,
                    "ranks": max(len(baseline.ranks), len(target.ranks)),
                }
            ),
            "notes": [*verdict.notes, *lost.notes()],
        }
    )


def _compare(
    baseline: Run,
    target: Run,
    selection: Selection,
    same_program: bool,
    verify: bool,
    progress: Progress,
    ranks_of: Callable[[int, int, int], tuple[int, ...]] | None = None,
) -> Verdict:
    """ranks_of: the ranks behind a row of the baseline (side 0) or target (side 1) in a step."""
    scans = _scan(baseline, target, selection, verify, progress)
    one_program = same_program or is_same_program(baseline, target)
    notes = differences_of_runs(baseline, target) + scan_notes(scans)
    reasons = obstacles(baseline, target, selection, scans)
    origins, decide = origins_of(scans), cause_of
    if not origins.minimal and any(scan.common_boundaries for scan in scans):
        origins, decide = structures_of(scans), structure_of
    if not origins.minimal:
        word: Word = "incomparable" if reasons else "identical"
        return _verdict(baseline, target, word, reasons + notes, scans)
    if origins.num_more:
        notes.append(f"{origins.num_more} more boundaries differ first, beside those listed")
    if ranks_of is not None:
        origins = replace(origins, minimal=_on_ranks(origins.minimal, ranks_of), per_rank=())
    minimal, per_rank = (
        [_divergence(origin, decide, baseline, one_program) for origin in listed]
        for listed in (origins.minimal, origins.per_rank)
    )
    return _verdict(baseline, target, "divergent", notes + reasons, scans, minimal, per_rank)


def _on_ranks(
    origins: Sequence[Origin], ranks_of: Callable[[int, int, int], tuple[int, ...]]
) -> tuple[Origin, ...]:
    """The origins with the ranks that hold their tensors: the target's, where it has them."""
    renamed = []
    for origin in origins:
        row, side = origin.finding.target_row, 1
        if row is None:
            row, side = origin.finding.baseline_row, 0
        assert row is not None
        step = origin.scan.steps.partner[origin.step] if side else origin.step
        renamed.append(replace(origin, ranks=ranks_of(side, step, row)))
    return tuple(renamed)


def _scan(
    baseline: Run, target: Run, selection: Selection, verify: bool, progress: Progress
) -> list[RankScan]:
    """Compare all ranks that both runs have."""
    ranks = [r for r in baseline.ranks if r in target.ranks and selection.has_rank(r)]
    settings = Settings.of(baseline, target)
    lag = steps_behind(baseline, target, ranks[0]) if ranks else 0
    scans: list[RankScan] = []
    for rank in ranks:
        steps = RankSteps(baseline, target, rank, lag)
        scan = RankScan(rank, steps)
        for done, _ in enumerate(scan_rank(scan, selection, settings, verify=verify)):
            progress(len(scans) + done / len(steps.common), len(ranks))
        scans.append(scan)
    return scans


def _divergence(
    origin: Origin, decide: Callable[[Scene], Cause], baseline: Run, one_program: bool
) -> Divergence:
    pairing = origin.scan.steps.pairing(origin.step)
    assert pairing is not None
    world_size = baseline.manifest.world_size
    scene = Scene(origin.scan.steps, origin.step, pairing, origin.finding, world_size, one_program)
    return divergence(origin, scene, decide(scene))


def _verdict(
    baseline: Run,
    target: Run,
    word: Word,
    notes: Sequence[str],
    scans: Sequence[RankScan] = (),
    minimal: Sequence[Divergence] = (),
    per_rank: Sequence[Divergence] = (),
) -> Verdict:
    return Verdict(
        verdict=word,
        baseline=_side(baseline),
        target=_side(target),
        first_divergence=minimal[0] if minimal else None,
        concurrent=list(minimal[1:]),
        tainted=None,
        per_rank=list(per_rank),
        certified=_certified(
            scans, None if len(scans) == 1 or not minimal else minimal[0].ranks[0]
        ),
        coverage=_coverage(baseline, target, scans),
        notes=list(notes),
    )


def _side(run: Run) -> RunSide:
    layout = run.layout(run.ranks[0]) if run.ranks else Layout()
    return RunSide.of(run.path, run.manifest.run_id, run.manifest.world_size, layout)


def _certified(scans: Sequence[RankScan], rank: int | None) -> Certified:
    """What is equal, rank by rank, up to where each first differs; the last of it on `rank`."""
    ends = [scan for scan in scans if scan.last_equal is not None and rank in (None, scan.rank)]
    last = None
    if ends and ends[0].last_equal is not None:
        step, row = ends[0].last_equal
        pairing = ends[0].steps.pairing(step)
        assert pairing is not None
        last = event_ref(pairing.baseline.batch, row, ends[0].rank)
    return Certified(events=sum(scan.certified for scan in scans), last=last)


def _coverage(baseline: Run, target: Run, scans: Sequence[RankScan]) -> Coverage:
    unchosen = set(baseline.ranks) - {scan.rank for scan in scans}
    skipped = sum(entry.num_events for rank in unchosen for entry in baseline.steps(rank))
    return Coverage(
        ranks=len(scans),
        compared=sum(scan.compared for scan in scans),
        differ=sum(scan.differ for scan in scans),
        unmatched_baseline=sum(scan.unmatched_baseline for scan in scans),
        unmatched_target=sum(scan.unmatched_target for scan in scans),
        not_comparable=sum(scan.not_comparable for scan in scans),
        filtered=sum(scan.filtered for scan in scans) + skipped,
        noise=0,
        never_fired=sum(
            note.startswith(NEVER_FIRED)
            for run in (baseline, target)
            for scan in scans
            for note in run.end(scan.rank).notes
        ),
    )
