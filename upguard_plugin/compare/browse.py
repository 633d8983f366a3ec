"""The events of one run, filtered, for `upguard show`.

In:  a run and a selection.
Out: events, rank by rank, step by step, in program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from upguard_plugin.compare.describe import group_ref, source_ref
from upguard_plugin.compare.idle_rules import refuse_absent
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import UsageError
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.verdict import SeenEvent


def browse(run: Run, selection: Selection, limit: int | None = None) -> Iterator[SeenEvent]:
    """At most `limit` events. Raises UsageError for what the run does not have."""
    refuse_absent(run, selection)
    events = _chosen(run, selection, limit)
    first = list(islice(events, 1))
    if not first and limit != 0:
        if selection.all_events:
            raise UsageError(f"{run.path} has no event: no step of it was recorded to its end")
        raise UsageError(
            f"{run.path} has no event that was asked for",
            remedy=f"upguard show {run.path}, without --modules, --roles and --phase",
        )
    return chain(first, events)


def _chosen(run: Run, selection: Selection, limit: int | None) -> Iterator[SeenEvent]:
    left = limit
    for rank in run.ranks:
        if not selection.has_rank(rank):
            continue
        for entry in run.steps(rank):
            if left == 0:
                return
            if not selection.has_step(entry.step):
                continue
            batch = run.read(rank, entry.step)
            rows = np.flatnonzero(selection.has_keys(batch.keys)[batch.key])[:left]
            yield from (seen_event(batch, row, rank) for row in rows.tolist())
            left = None if left is None else left - len(rows)


def seen_event(batch: EventBatch, row: int, rank: int) -> SeenEvent:
    key = batch.key_of(row)
    value = None if batch.value is None else float(batch.value[row])
    microbatch = int(batch.microbatch[row])
    return SeenEvent(
        step=batch.step,
        iteration=batch.iteration,
        rank=rank,
        microbatch=None if microbatch < 0 else microbatch,
        phase=key.phase,
        seq=int(batch.seq[row]),
        boundary=key.boundary,
        operator=key.operator,
        role=key.role,
        slot=key.slot,
        moment=key.moment,
        call=int(batch.call[row]),
        dtype=key.dtype,
        shape=list(key.shape),
        placement=None if key.placement is None else key.placement.spec,
        fingerprint=f"{int(batch.h[row]):016x}",
        value=None if value is None or np.isnan(value) else value,
        group=group_ref(batch, row),
        op=key.op,
        source=source_ref(key),
    )
