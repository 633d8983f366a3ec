"""How a verdict refers to an event, its group and its line."""

from __future__ import annotations

from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.verdict_parts import EventRef, GroupRef, SourceRef


def event_ref(batch: EventBatch, row: int, rank: int) -> EventRef:
    key = batch.key_of(row)
    return EventRef(
        step=batch.step,
        rank=rank,
        microbatch=or_none(int(batch.microbatch[row])),
        phase=key.phase,
        boundary=key.boundary,
        operator=key.operator,
        role=key.role,
        slot=key.slot,
        call=int(batch.call[row]),
    )


def group_ref(batch: EventBatch, row: int) -> GroupRef | None:
    group = batch.key_of(row).group
    if group is None:
        return None
    seq = None if batch.group_seq is None else or_none(int(batch.group_seq[row]))
    return GroupRef(name=group.name, ranks=list(group.ranks), seq=seq)


def source_ref(key: EventKey) -> SourceRef | None:
    return None if key.source is None else SourceRef(file=key.source.file, line=key.source.line)


def or_none(number: int) -> int | None:
    return None if number < 0 else number
