"""What a comparison leaves out because it was told to, in the words of the verdict's notes."""

from __future__ import annotations

from collections.abc import Sequence

from upguard_plugin.compare.facts import RankFacts
from upguard_plugin.compare.obstacles import layouts_differ, refusal
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import IncomparableError

MAX_NAMES = 50  # boundaries that one note names; behind the first noise nearly everything is noise


def refuse_other_runs(baseline: Run, target: Run, noise: Sequence[Run]) -> None:
    """Raises IncomparableError for what can be no repeat of the baseline."""
    compared = {baseline.manifest.run_id: "baseline", target.manifest.run_id: "target"}
    for repeat in noise:
        why = refusal(baseline, repeat)
        if repeat.manifest.run_id in compared:
            why = f"it is the {compared[repeat.manifest.run_id]} itself"
        if layouts_differ(baseline, repeat):
            why = "the layouts differ"
        if why is not None:
            raise IncomparableError(
                f"{repeat.path} is no repeat of the baseline: {why}",
                remedy="name a second run of the baseline's program with --noise",
            )


def left_out_notes(facts: Sequence[RankFacts], selection: Selection) -> list[str]:
    """One note per ignore rule, and one per step at which noise begins."""
    notes = []
    for place, rule in enumerate(selection.ignore):
        count = sum(found.ignored.get(place, 0) for found in facts)
        notes.append(f"ignored: {count} events of {rule.text}: {rule.reason}")
    first: dict[str, int] = {}
    for found in facts:
        for name, step in found.noisy.items():
            first[name] = min(step, first.get(name, step))
    by_step: dict[int, list[str]] = {}
    for name, step in first.items():
        by_step.setdefault(step, []).append(name)
    for step, names in sorted(by_step.items()):
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        notes.append(
            f"noise: from step {step} on a repeat of the baseline differs in "
            f"{', '.join(names[:MAX_NAMES])}{more}"
        )
    return notes
