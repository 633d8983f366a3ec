"""What stands in the way of a comparison, and what the runs themselves differ in.

In:  two runs, the selection, and what was counted on each rank.
Out: sentences for the verdict's notes. A *refusal* ends the comparison before it starts; an
     *obstacle* stands in the way of "identical" only: a divergence is proven without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from upguard_plugin.compare.facts import RankFacts
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.scan import CHOICES
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.steps import RankSteps
from upguard_plugin.records import NEVER_FIRED

RENUMBERED = "resumed: step "  # how the note on other numbers of steps begins
OTHER_PLACEMENTS = "the runs give these tensors other placements"
_PROGRAMS_DIFFER = "program: other sources, command or training config"
_MAX_LISTED = 8
_NONE = "none"


def refusal(baseline: Run, target: Run) -> str | None:
    """Why the two cannot be compared at all, or None."""
    versions = (baseline.manifest.fingerprint_version, target.manifest.fingerprint_version)
    if versions[0] != versions[1]:
        return (
            f"fingerprints of version {versions[0]} and {versions[1]} cannot be compared: "
            "record one of the runs again with the other's UpGuard"
        )
    return None


def layouts_differ(baseline: Run, target: Run) -> bool:
    """Whether the runs used their ranks in different ways. A layout that is not known is any."""
    if baseline.manifest.world_size != target.manifest.world_size:
        return True
    layouts = [
        (baseline.layout(rank), target.layout(rank))
        for rank in sorted(set(baseline.ranks) & set(target.ranks))
    ]
    return any(ours.axes and theirs.axes and ours != theirs for ours, theirs in layouts)


def obstacles(
    baseline: Run,
    target: Run,
    selection: Selection,
    facts: Sequence[RankFacts],
    unjudged: str = OTHER_PLACEMENTS,
) -> list[str]:
    """Why equal events do not prove equal runs; empty if nothing stands in the way.

    unjudged: why some unequal events say nothing.
    """
    reasons = _missing_ranks(baseline, target, selection)
    reasons += [reason for found in facts for reason in found.reasons]
    total = totals(facts)
    if total["not_comparable"]:
        reasons.append(f"{_count(total['not_comparable'], 'event')} not comparable: {unjudged}")
    if total["noise"] and not total["compared"]:
        reasons.append("nothing was compared: all that both runs have is noise")
    elif facts and not total["compared"]:
        reasons.append("nothing in common: no event of the baseline has a partner in the target")
    elif any(found.structure for found in facts) and not total["common_boundaries"]:
        reasons.append("nothing in common: only scalars, random states and batches have partners")
    return reasons


def totals(facts: Sequence[RankFacts]) -> Counter[str]:
    """The counts of all ranks together."""
    total: Counter[str] = Counter()
    for found in facts:
        total.update(found.counts)
    return total


def _missing_ranks(baseline: Run, target: Run, selection: Selection) -> list[str]:
    reasons = []
    for side, run in (("baseline", baseline), ("target", target)):
        lacking: Iterable[int] = sorted(run.missing_ranks)
        if selection.ranks is not None:
            lacking = selection.ranks.without(set(run.ranks))
        wanted = _listed(lacking)
        if wanted != _NONE:
            found = sorted(run.ranks)
            others = f", or name the ranks to compare: --ranks {_listed(found, ',')}"
            reasons.append(
                f"missing ranks: the {side} lacks {wanted} (found {_listed(found)}); "
                f"copy the missing files{others if found else ''}"
            )
    one_sided = set(baseline.ranks) ^ set(target.ranks)
    if selection.ranks is None and one_sided and not reasons:
        common = sorted(set(baseline.ranks) & set(target.ranks))
        others = f"; name the ranks to compare: --ranks {_listed(common, ',')}" if common else ""
        reasons.append(f"ranks {_listed(sorted(one_sided))} were recorded by one run only{others}")
    return reasons


def missing_steps(baseline: Run, target: Run, selection: Selection, steps: RankSteps) -> list[str]:
    """Which steps of a rank could not be compared, and why."""
    reasons = []
    chosen = steps.common[selection.has_steps(steps.common)]
    if selection.steps is not None:
        lacking = _listed(selection.steps.without(set(chosen.tolist())))
        if lacking != _NONE:
            reasons.append(
                f"rank {steps.rank}: steps {lacking} were asked for, and not both runs have them"
            )
    if not len(chosen):
        reasons += _ended_early(baseline, target, steps, 0)
        reasons.append(f"rank {steps.rank}: the runs have no finished step in common")
    elif selection.steps is None or not _is_bounded(selection):
        reasons += _ends(baseline, target, steps, len(chosen))
    return reasons


def _is_bounded(selection: Selection) -> bool:
    return selection.steps is not None and None not in {last for _, last in selection.steps.ranges}


def _ended_early(baseline: Run, target: Run, steps: RankSteps, num_common: int) -> list[str]:
    reasons = []
    for side, run in (("baseline", baseline), ("target", target)):
        end = run.end(steps.rank)
        if not end.complete:
            reasons.append(
                f"incomplete: rank {steps.rank} of the {side} ended early "
                f"({end.reason or 'no reason given'}); what was compared ends after "
                f"{_count(num_common, 'step')}"
            )
    return reasons


def _ends(baseline: Run, target: Run, steps: RankSteps, num_common: int) -> list[str]:
    reasons = _ended_early(baseline, target, steps, num_common)
    counts = (len(steps.tables[0]), len(steps.tables[1]))
    matched = num_common == counts[0] == counts[1] or (steps.is_resumed and steps.covers_the_rest)
    if not matched and not reasons:
        reasons.append(
            f"rank {steps.rank}: {_count(counts[0], 'step')} in the baseline, {counts[1]} in the "
            f"target; what was compared are the {num_common} that both have"
        )
    return reasons


def is_same_program(baseline: Run, target: Run) -> bool:
    """Equal program digests and equal environment."""
    ours, theirs = baseline.manifest, target.manifest
    return (
        bool(ours.program_digest)
        and (ours.program_digest, ours.program) == (theirs.program_digest, theirs.program)
        and dict(ours.versions) == dict(theirs.versions)
        and dict(ours.variables) == dict(theirs.variables)
    )


def differences_of_runs(baseline: Run, target: Run) -> list[str]:
    """What the manifests and ends say that a reader of the verdict must know."""
    ours, theirs = baseline.manifest, target.manifest
    notes = [
        f"environment: {text}"
        for text in [
            *_changed(ours.versions, theirs.versions, " "),
            *_changed(ours.variables, theirs.variables, "="),
        ]
    ]
    if ours.program != theirs.program:
        notes.append(f"program: {ours.program!r} against {theirs.program!r}")
    elif ours.program_digest and theirs.program_digest:
        same = ours.program_digest == theirs.program_digest
        notes.append("program: the same in both runs" if same else _PROGRAMS_DIFFER)
    if ours.level != theirs.level:
        notes.append(f"level: {ours.level} against {theirs.level}; compared is what both record")
    for name in CHOICES:
        mine, other = ours.config.get(name), theirs.config.get(name)
        if mine != other:
            notes.append(f"{name}: {mine} against {other}; compared is what both record")
    for side, run in (("baseline", baseline), ("target", target)):
        if run.attempts:
            names = _listed([path.name for path in run.attempts])
            notes.append(f"{side}: the job was restarted; {names} are runs of their own")
        notes += [f"{side}: {note}" for note in notes_of(run)]
    return notes


def notes_of(run: Run) -> list[str]:
    """What a run's manifest and ranks note, once each; what never fired only if on no rank."""
    told = Counter(note for rank in run.ranks for note in dict.fromkeys(run.end(rank).notes))
    heard = [
        note
        for note, num_ranks in told.items()
        if num_ranks == len(run.ranks) or not note.startswith(NEVER_FIRED)
    ]
    return list(dict.fromkeys([*run.manifest.notes, *heard]))


def rank_notes(facts: Sequence[RankFacts]) -> list[str]:
    """What was seen on the ranks beside a divergence."""
    unused: dict[tuple[str, int], list[int]] = {}
    for found in facts:
        for name_and_step in found.unused.items():
            unused.setdefault(name_and_step, []).append(found.rank)
    notes = _resumed(facts)
    notes += [
        f"not used: {name} differs from step {step} on (rank {_listed(ranks)}), and "
        + ("nobody draws from it" if name.startswith("rng.") else "nothing behind it does")
        for (name, step), ranks in unused.items()
    ]
    notes += [
        f"structure: from step {found.structure.step} on boundaries differ without a value behind "
        f"them, first {found.structure.name.boundary} (rank {found.rank})"
        for found in facts
        if found.structure is not None and found.first is not None
    ]
    return notes


def _resumed(facts: Sequence[RankFacts]) -> list[str]:
    """Where the runs' own numbers of a step differ."""
    shifts: dict[tuple[int, int], list[int]] = {}
    for found in facts:
        if found.renumbered is not None:
            shifts.setdefault(found.renumbered, []).append(found.rank)
    return [
        f"{RENUMBERED}{step} of the baseline is step {other} of the target, rank {_listed(ranks)}"
        for (step, other), ranks in shifts.items()
        if step != other
    ]


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str], between: str) -> Iterable[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            left = f"{name}{between}{mine}" if mine is not None else f"{name} unset"
            yield f"{left} against {'unset' if other is None else other}"


def _listed(items: Iterable[object], comma: str = ", ") -> str:
    """The first of them, and how many more there are; "more" alone if nobody has counted them."""
    listed = iter(items)
    shown = [str(item) for item in islice(listed, _MAX_LISTED)]
    if isinstance(items, Sequence):
        more = f" and {len(items) - len(shown)} more" if len(items) > len(shown) else ""
    else:
        more = " and more" if next(listed, None) is not None else ""
    return (comma.join(shown) or _NONE) + more


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
