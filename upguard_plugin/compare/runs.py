"""Two runs in, one verdict out.

In:  two runs, and what is to be compared of them.
Out: a `Verdict`. Runs that cannot be compared give one too, with the reason as its first note.

`identical` is said only if everything that was asked for was read on both sides and is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upguard_plugin.compare.causes import Cause, cause_of, structure_of
from upguard_plugin.compare.describe import divergence, event_ref
from upguard_plugin.compare.evidence import Scene
from upguard_plugin.compare.left_out import left_out_notes, refuse_other_runs
from upguard_plugin.compare.noise import RankNoise
from upguard_plugin.compare.obstacles import (
    NEVER_FIRED,
    differences_of_runs,
    is_same_program,
    obstacles,
    refusal,
    scan_notes,
)
from upguard_plugin.compare.ranks import Origin, origins_of, structures_of
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import RankScan, Settings, scan_rank
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.steps import RankSteps, steps_behind
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
    noise: Sequence[Run] = (),
    progress: Progress = lambda done, total: None,
) -> Verdict:
    """Compare two runs of one layout.

    noise: repeats of the baseline; what differs between it and one of them is left out.
    same_program: take both for runs of the same program, whatever their digests say.
    verify: decode and check every step, also where digests agree.
    progress: called after each step with how many ranks are done, in fractions, and of how many.
    Raises TraceError for damaged files, UsageError for a selection that no run can satisfy.
    """
    selection = selection or Selection()
    refused = refusal(baseline, target)
    if refused:
        return _verdict(baseline, target, "incomparable", [refused])
    refuse_other_runs(baseline, noise)
    scans = _scan(baseline, target, selection, verify, noise, progress)
    one_program = same_program or is_same_program(baseline, target)
    notes = differences_of_runs(baseline, target) + scan_notes(scans)
    notes += left_out_notes(scans, selection)
    reasons = obstacles(baseline, target, selection, scans)
    origins, decide = origins_of(scans), cause_of
    if not origins.minimal and any(scan.common_boundaries for scan in scans):
        origins, decide = structures_of(scans), structure_of
    if not origins.minimal:
        word: Word = "incomparable" if reasons else "identical"
        return _verdict(baseline, target, word, reasons + notes, scans)
    if origins.num_more:
        notes.append(f"{origins.num_more} more boundaries differ first, beside those listed")
    minimal, per_rank = (
        [_divergence(origin, decide, baseline, one_program) for origin in listed]
        for listed in (origins.minimal, origins.per_rank)
    )
    return _verdict(baseline, target, "divergent", notes + reasons, scans, minimal, per_rank)


def _scan(
    baseline: Run,
    target: Run,
    selection: Selection,
    verify: bool,
    noise: Sequence[Run],
    progress: Progress,
) -> list[RankScan]:
    """Compare all ranks that both runs have."""
    ranks = [r for r in baseline.ranks if r in target.ranks and selection.has_rank(r)]
    settings = Settings.of(baseline, target)
    lag = steps_behind(baseline, target, ranks[0]) if ranks else 0
    scans: list[RankScan] = []
    for rank in ranks:
        steps = RankSteps(baseline, target, rank, lag)
        scan = RankScan(rank, steps)
        found = RankNoise(baseline, noise, rank, steps.space) if noise else None
        scanned = scan_rank(scan, selection, settings, verify=verify, noise=found)
        for done, _ in enumerate(scanned):
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
        certified=_certified(scans, minimal[0].ranks[0] if minimal else None),
        coverage=_coverage(baseline, target, scans),
        notes=list(notes),
    )


def _side(run: Run) -> RunSide:
    layout = run.layout(run.ranks[0]) if run.ranks else Layout()
    sizes = {"world_size": run.manifest.world_size}
    sizes |= {axis.name: axis.size for axis in layout.axes}
    if layout.zero_stage is not None:
        sizes["zero_stage"] = layout.zero_stage
    return RunSide(path=str(run.path), run_id=run.manifest.run_id, layout=sizes)


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
        noise=sum(scan.noise for scan in scans),
        never_fired=sum(
            note.startswith(NEVER_FIRED)
            for run in (baseline, target)
            for scan in scans
            for note in run.end(scan.rank).notes
        ),
    )
