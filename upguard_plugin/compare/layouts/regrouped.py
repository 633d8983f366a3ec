"""Whether two runs put the same samples into micro-batches of other sizes."""

from __future__ import annotations

from collections import Counter

from upguard_plugin.compare.run import Run
from upguard_plugin.trace.batch import EventBatch

Sample = tuple[str, int, int]  # boundary, h, s


def micro_batches_differ(baseline: Run, target: Run) -> bool:
    """Told by the first step of the lowest rank; False where no samples were recorded.

    Nothing is read where the digests of that step agree.
    """
    ranks = sorted(set(baseline.ranks) & set(target.ranks))
    if not ranks or (baseline.manifest.world_size > 1 and not baseline.layout(ranks[0]).axes):
        return False
    entries = [run.steps(ranks[0])[:1] for run in (baseline, target)]
    if not all(entries) or entries[0][0].digest == entries[1][0].digest:
        return False
    ours, theirs = (
        _samples(run.read(ranks[0], listed[0].step))
        for run, listed in zip((baseline, target), entries, strict=True)
    )
    sizes = [sorted(len(group) for group in side.values()) for side in (ours, theirs)]
    totals = [Counter(one for group in side.values() for one in group) for side in (ours, theirs)]
    return sizes[0] != sizes[1] and totals[0] == totals[1]


def _samples(batch: EventBatch) -> dict[int, list[Sample]]:
    """The samples of each micro-batch."""
    found: dict[int, list[Sample]] = {}
    for row, number in enumerate(batch.key.tolist()):
        key = batch.keys[number]
        if key.role == "sample":
            one = (key.boundary, int(batch.h[row]), int(batch.s[row]))
            found.setdefault(int(batch.microbatch[row]), []).append(one)
    return found
