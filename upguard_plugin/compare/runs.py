"""Two runs in, one verdict out.

In:  two runs, and what is to be compared of them.
Out: a `Verdict`. Runs that cannot be compared give one too, with the reason as its first note.

`identical` is said only if everything that was asked for was read on both sides and is equal. All
processes of a team run this code and come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from upguard_plugin.compare.causes import cause_of, structure_of
from upguard_plugin.compare.crew import Crew
from upguard_plugin.compare.facts import RankFacts
from upguard_plugin.compare.handover import handed_over, handover_of
from upguard_plugin.compare.layouts.exactly import exactly
from upguard_plugin.compare.layouts.gathering import Gathering
from upguard_plugin.compare.layouts.logical import LogicalPair
from upguard_plugin.compare.layouts.region import matched, tainted
from upguard_plugin.compare.layouts.taint import NO_SKETCHES
from upguard_plugin.compare.layouts.units import cut_otherwise
from upguard_plugin.compare.left_out import left_out_notes, refuse_other_runs
from upguard_plugin.compare.noise import Repeat
from upguard_plugin.compare.obstacles import (
    OTHER_PLACEMENTS,
    RENUMBERED,
    differences_of_runs,
    is_same_program,
    layouts_differ,
    notes_of,
    obstacles,
    rank_notes,
    refusal,
    totals,
)
from upguard_plugin.compare.ranks import Ask, Origin, origins_of, structures_of
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import Request, Settings
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.spread import MAX_RANKS
from upguard_plugin.compare.steps import Judge, as_it_is
from upguard_plugin.compare.survey import surveyed
from upguard_plugin.compare.team import Alone, Team
from upguard_plugin.errors import UsageError
from upguard_plugin.records import NEVER_FIRED, Layout
from upguard_plugin.verdict import (
    Certified,
    Coverage,
    Divergence,
    RunSide,
    Verdict,
    Word,
)

Progress = Callable[[float, int], None]

_NOTHING = Certified(events=0, last=None)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of two runs, beside the runs."""

    selection: Selection
    same_program: bool
    exact: bool
    verify: bool
    noise: tuple[Run, ...]
    progress: Progress


def compare_runs(
    baseline: Run,
    target: Run,
    selection: Selection | None = None,
    *,
    same_program: bool = False,
    exact: bool = False,
    verify: bool = False,
    noise: Sequence[Run] = (),
    team: Team | None = None,
    progress: Progress = lambda done, total: None,
) -> Verdict:
    """Compare two runs, rank by rank, or across layouts as runs of one rank.

    noise: repeats of the baseline; what differs between it and one of them is left out.
    same_program: take both for runs of the same program, whatever their digests say.
    exact: sums have no rounding in either run, so that no difference across layouts is rounding.
    verify: decode and check every step, also where digests agree.
    team: the processes that do it together; each of them calls this with the same arguments.
    progress: called after each step with how many ranks are done, in fractions, and of how many.
    Raises TraceError for damaged files, UsageError for a selection that no run can satisfy,
    IncomparableError for noise that is no repeat of the baseline.
    """
    team = team or Alone()
    baseline, target, *repeats = (surveyed(run, team) for run in (baseline, target, *noise))
    selection = selection or Selection()
    question = _Question(selection, same_program, exact, verify, tuple(repeats), progress)
    refused = refusal(baseline, target)
    if refused:
        skipped = Crew(baseline, target, [], team).num_events_of_others(baseline)
        coverage = _coverage(baseline, target, (), skipped)
        return _verdict(baseline, target, "incomparable", [refused], _NOTHING, coverage)
    refuse_other_runs(baseline, target, repeats)
    if not _across_layouts(baseline, target, team):
        order = _handover(baseline, target, question, team)
        if order:
            return _compare_states(baseline, target, question, team, order)
        repeated = [(baseline, repeat) for repeat in question.noise]
        return _compare(baseline, target, question, team, repeated)

    gathering = Gathering((baseline, target, *repeats), team, verify=verify)
    return gathering.led(lambda: _compare_logical(baseline, target, question, gathering))


def _across_layouts(baseline: Run, target: Run, team: Team) -> bool:
    """Whether the runs are compared by logical tensors: ranks or micro-batches were used otherwise.

    The first process looks into the runs and tells the others.
    """
    if layouts_differ(baseline, target):
        return True
    return any(team.share(lambda: [] if team.index else [cut_otherwise(baseline, target)]))


def _handover(baseline: Run, target: Run, question: _Question, team: Team) -> int:
    """Which run begins where the other ended, if no single steps were asked for."""
    common = [rank for rank in baseline.ranks if rank in target.ranks][:1]
    if question.selection.steps is not None or question.noise or not common:
        return 0
    return sum(team.share(lambda: [] if team.index else [handover_of(baseline, target, common[0])]))


def _compare_states(
    baseline: Run, target: Run, question: _Question, team: Team, order: int
) -> Verdict:
    """Compare what one run left with what the other found of it: no step is in both."""
    verdict = _compare(*handed_over(baseline, target, order), question, team)
    sides = ("baseline", "target") if order > 0 else ("target", "baseline")
    note = (
        f"resumed: no step is in both runs; compared is the state that the {sides[0]} left with "
        f"the one that the {sides[1]} found"
    )
    notes = [note, *(told for told in verdict.notes if not told.startswith(RENUMBERED))]
    word: Word = "incomparable" if verdict.verdict == "identical" else verdict.verdict
    return verdict.model_copy(update={"verdict": word, "notes": notes})


def _compare_logical(
    baseline: Run, target: Run, question: _Question, gathering: Gathering
) -> Verdict:
    """Compare runs of other layouts by their logical tensors."""
    if question.selection.ranks is not None:
        raise UsageError(
            "--ranks cannot be used across layouts: a logical tensor is made of all ranks' parts"
        )
    pair = LogicalPair(gathering, 0, 1)
    views = matched(pair)
    repeats = [matched(LogicalPair(gathering, 0, 2 + n)) for n in range(len(question.noise))]
    verdict = _compare(*views, question, Alone(), repeats, pair)
    lost, taint = pair.left_out, pair.taint
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
            "tainted": tainted(pair, verdict),
            "left_out": lost.listed(),
            "notes": [*verdict.notes, *taint.notes(), *lost.notes()],
        }
    )


def _compare(
    baseline: Run,
    target: Run,
    question: _Question,
    team: Team,
    repeats: Sequence[Repeat] = (),
    pair: LogicalPair | None = None,
) -> Verdict:
    """pair: across layouts, what the two runs are views of."""
    selection = question.selection
    ranks = [r for r in baseline.ranks if r in target.ranks and selection.has_rank(r)]
    request = Request(selection, Settings.of(baseline, target), question.verify)
    crew = Crew(baseline, target, ranks, team, _judge(pair, question))
    facts = crew.scan(request, repeats, question.progress)
    one_program = question.same_program or is_same_program(baseline, target)
    notes = differences_of_runs(baseline, target) + rank_notes(facts)
    notes += left_out_notes(facts, selection)
    unjudged = OTHER_PLACEMENTS if pair is None else NO_SKETCHES
    reasons = obstacles(baseline, target, selection, facts, unjudged)
    reasons += [] if pair is None else pair.left_out.holes()
    origins, decide = origins_of(facts, Ask(crew.messages, crew.sightings)), cause_of
    if not origins.minimal and totals(facts)["common_boundaries"]:
        origins, decide = structures_of(facts), structure_of
    coverage = _coverage(baseline, target, facts, crew.num_events_of_others(baseline))
    if not origins.minimal:
        word: Word = "incomparable" if reasons else "identical"
        certified = _certified(facts, None, crew)
        return _verdict(baseline, target, word, reasons + notes, certified, coverage)
    if origins.num_more:
        notes.append(f"{origins.num_more} more boundaries differ first, beside those listed")
    spread = crew.spread(origins.in_order()[:MAX_RANKS]) if decide is cause_of else []
    if pair is not None:
        origins = replace(origins, minimal=_on_ranks(origins.minimal, pair), per_rank=())
    minimal, per_rank = (
        crew.described(listed, decide, one_program)
        for listed in (origins.minimal, origins.per_rank)
    )
    certified = _certified(facts, None if len(facts) == 1 else minimal[0].ranks[0], crew)
    notes += reasons
    verdict = _verdict(baseline, target, "divergent", notes, certified, coverage, minimal, per_rank)
    return verdict.model_copy(update={"spread": spread})


def _judge(pair: LogicalPair | None, question: _Question) -> Judge:
    """What tells how unequal bits are to be read."""
    if pair is None:
        return as_it_is
    return exactly(pair.events) if question.exact else pair.taint.judged


def _on_ranks(origins: Sequence[Origin], pair: LogicalPair) -> tuple[Origin, ...]:
    """The origins with the ranks that hold their tensors: the target's, where it has them."""
    renamed = []
    for origin in origins:
        seen = origin.seen
        side, step, row = 1, seen.target_step, seen.finding.target_row
        if row is None:
            side, step, row = 0, seen.step, seen.finding.baseline_row
        assert row is not None
        renamed.append(replace(origin, ranks=pair.events(side, step)[row].ranks))
    return tuple(renamed)


def _verdict(
    baseline: Run,
    target: Run,
    word: Word,
    notes: Sequence[str],
    certified: Certified,
    coverage: Coverage,
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
        certified=certified,
        coverage=coverage,
        notes=list(notes),
    )


def _side(run: Run) -> RunSide:
    layout = run.layout(run.ranks[0]) if run.ranks else Layout()
    return RunSide.of(run.path, run.manifest.run_id, run.manifest.world_size, layout)


def _certified(facts: Sequence[RankFacts], rank: int | None, crew: Crew) -> Certified:
    """What is equal, rank by rank, up to where each first differs; the last of it on `rank`."""
    ends = [found for found in facts if found.last_equal is not None and rank in (None, found.rank)]
    last = crew.event(ends[0].rank, *ends[0].last_equal) if ends and ends[0].last_equal else None
    return Certified(events=totals(facts)["certified"], last=last)


def _coverage(baseline: Run, target: Run, facts: Sequence[RankFacts], num_skipped: int) -> Coverage:
    total = totals(facts)
    return Coverage(
        ranks=len(facts),
        compared=total["compared"],
        differ=total["differ"],
        unmatched_baseline=total["unmatched_baseline"],
        unmatched_target=total["unmatched_target"],
        not_comparable=total["not_comparable"],
        tainted=total["tainted"],
        filtered=total["filtered"] + num_skipped,
        ignored=sum(sum(found.ignored.values()) for found in facts),
        noise=total["noise"],
        never_fired=sum(
            note.startswith(NEVER_FIRED) for run in (baseline, target) for note in notes_of(run)
        ),
    )
