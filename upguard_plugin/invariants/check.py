"""One run in, one report out: every invariant looks at every step of all ranks, in order.

In:  a trace, and which of its events the user asks for.
Out: a `CheckReport`. One step of all ranks is in memory at a time.

Filters say which places are reported; what proves or breaks an invariant there may lie outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from upguard_plugin.check_report import (
    Answer,
    Broken,
    Checked,
    CheckReport,
    RankTensor,
)
from upguard_plugin.invariants.catalogue import every_invariant
from upguard_plugin.invariants.events import KeyTables, Place, RankEvents, StepEvents
from upguard_plugin.invariants.findings import Break, Findings, Invariant, in_order
from upguard_plugin.records import EventKey, Layout
from upguard_plugin.trace.reader import Trace
from upguard_plugin.verdict import RunSide
from upguard_plugin.verdict_parts import EventRef, GroupRef, SourceRef

Found = list[tuple[Invariant, Findings]]


class Selection(Protocol):
    """What a check looks at."""

    def has_step(self, step: int) -> bool: ...
    def has_rank(self, rank: int) -> bool: ...
    def has_key(self, key: EventKey) -> bool: ...


def check_run(
    run: Trace, selection: Selection, *, progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Check one run.

    progress: called with the number of steps done and of all steps.
    Raises TraceError for damaged files.
    """
    ranks = [rank for rank in run.ranks if selection.has_rank(rank)]
    found: Found = [(one, Findings(one.name, selection)) for one in every_invariant()]
    steps, num_events, tables = steps_of(run, ranks, selection), 0, KeyTables()
    for done, (step, present) in enumerate(steps.items()):
        seen = {
            rank: RankEvents(
                rank, run.layout(rank), run.read(rank, step), tables, run.manifest.level
            )
            for rank in present
        }
        num_events += sum(len(events.batch) for events in seen.values())
        for invariant, findings in found:
            invariant.look(StepEvents(step, seen), findings)
        if progress is not None:
            progress(done + 1, len(steps))
    for invariant, findings in found:
        invariant.finish(findings)
    coverage = Checked(ranks=len(ranks), steps=len(steps), events=num_events)
    return _report(run, ranks, found, coverage, selection)


def steps_of(run: Trace, ranks: Sequence[int], selection: Selection) -> dict[int, list[int]]:
    """step -> the ranks that recorded it, in order."""
    steps: dict[int, list[int]] = {}
    for rank in ranks:
        for entry in run.steps(rank):
            if selection.has_step(entry.step):
                steps.setdefault(entry.step, []).append(rank)
    return dict(sorted(steps.items()))


def _report(
    run: Trace,
    ranks: Sequence[int],
    looked: Found,
    coverage: Checked,
    selection: Selection,
) -> CheckReport:
    found = [findings for _, findings in looked]
    broken = in_order([b for findings in found for b in findings.broken.values()])
    suspects = in_order([b for findings in found for b in findings.suspects.values()])
    obstacles = _obstacles(run, ranks, selection, any(findings.checked for findings in found))
    answer: Answer = "broken" if broken else "undecided" if obstacles else "unbroken"
    notes = [note for rank in ranks for note in run.end(rank).notes]
    layout = run.layout(run.ranks[0]) if run.ranks else Layout()
    return CheckReport(
        answer=answer,
        run=RunSide.of(run.path, run.manifest.run_id, run.manifest.world_size, layout),
        broken=[_broken(one) for one in broken],
        checked={findings.invariant: findings.checked for findings in found if findings.checked},
        never_applied=[findings.invariant for findings in found if not findings.checked],
        why_never=_why_never(looked, len(ranks)),
        not_applied={f.invariant: dict(f.not_applied) for f in found if f.not_applied},
        suspects=[_broken(one) for one in suspects],
        coverage=coverage,
        notes=[*obstacles, *dict.fromkeys(notes)],
    )


def _why_never(looked: Found, num_ranks: int) -> dict[str, list[str]]:
    """reason -> the invariants that were never applied because of it."""
    reasons: dict[str, list[str]] = {}
    for invariant, findings in looked:
        if findings.checked:
            continue
        reason = "nothing that it applies to was recorded"
        if findings.not_applied:
            (reason, _), *_ = findings.not_applied.most_common(1)
        elif num_ranks == 1 and not invariant.needs_one_rank:
            reason = "it compares ranks, and one rank was recorded"
        reasons.setdefault(reason, []).append(invariant.name)
    return reasons


def _obstacles(run: Trace, ranks: Sequence[int], selection: Selection, anything: bool) -> list[str]:
    """Why "nothing is broken" would say too much."""
    reasons = []
    missing = [rank for rank in run.missing_ranks if selection.has_rank(rank)]
    if missing:
        others = f", or name the ranks to check: --ranks {','.join(map(str, run.ranks))}"
        reasons.append(
            f"missing ranks: {_listed(missing)} (found {_listed(run.ranks)}); copy the missing "
            f"files{others if run.ranks else ''}"
        )
    for rank in ranks:
        end = run.end(rank)
        if not end.complete:
            why = end.reason or "no reason given"
            reasons.append(f"incomplete: rank {rank} ended early ({why})")
    if not anything:
        reasons.append("nothing to check: no invariant applies to what was recorded")
    return reasons


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def _broken(found: Break) -> Broken:
    place = found.place
    return Broken(
        invariant=found.invariant,
        step=place.step,
        microbatch=place.microbatch,
        phase=place.phase,
        boundary=place.boundary,
        operator=place.operator,
        role=place.role,
        slot=place.slot,
        call=place.call,
        ranks=list(found.ranks),
        iteration=place.iteration,
        moment=place.moment,
        group=None
        if place.group is None
        else GroupRef(name=place.group.name, ranks=list(place.group.ranks), seq=place.group_seq),
        tensors=[
            RankTensor(rank=t.rank, dtype=t.dtype, shape=list(t.shape), fingerprint=f"{t.h:016x}")
            for t in found.tensors
        ],
        producer=_event(found.producer, found.ranks[0]),
        source=None
        if place.source is None
        else SourceRef(file=place.source.file, line=place.source.line),
        explanation=found.sentence,
        later=found.later,
    )


def _event(place: Place | None, rank: int) -> EventRef | None:
    if place is None:
        return None
    return EventRef(
        step=place.step,
        rank=rank,
        microbatch=place.microbatch,
        phase=place.phase,
        boundary=place.boundary,
        operator=place.operator,
        role=place.role,
        slot=place.slot,
        call=place.call,
    )
