"""A weight that is gathered for its use is what its shards make.

In:  shards as ranks keep them at the start of a step, whose placements say which part each is, and
     the whole weight as a module uses it first.

Fingerprints of shards, taken at their places, add up to that of the whole. Nothing is asked of the
layout: ranks with the same part hold replicas, of which one counts.
"""

from __future__ import annotations

from math import prod

from upguard_plugin.invariants.events import RankEvents, Sides, StepEvents, named_ranks, what
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.invariants.updates import USES, is_loaded, is_weight
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey, Piece

_LACKS_PARTS = "a rank that keeps a part of it was not recorded"
_UNLIKE = "it is used in another dtype or shape than its shards make"
_CHANGED = "it was updated or loaded before its use, or its copies differ"


class GatheredAsKept(Invariant):
    """Shards add up to the weight that a module uses."""

    name = "gathered-as-kept"

    def look(self, step: StepEvents, found: Findings) -> None:
        kept: dict[str, Sides] = {}
        used: dict[str, Sides] = {}
        changed: set[str] = set()
        for events in step:
            for row in events.rows(is_weight):
                key = events.key(row)
                if key.phase == "start" and key.placement is not None and key.placement.sharded:
                    kept.setdefault(key.boundary, {})[events.rank] = row
                elif key.phase in USES:
                    used.setdefault(key.boundary, {}).setdefault(events.rank, row)
                elif events.rank not in used.get(key.boundary, {}) and _replaces(key):
                    changed.add(key.boundary)
        for boundary, uses in used.items():
            if boundary in kept:
                self._judge(step, kept[boundary], uses, boundary in changed, found)

    def _judge(
        self, step: StepEvents, kept: Sides, uses: Sides, changed: bool, found: Findings
    ) -> None:
        parts: dict[tuple[Piece, ...], tuple[int, int]] = {}
        for rank, row in kept.items():
            placement = step.ranks[rank].key(row).placement
            assert placement is not None  # `look` keeps no others
            value = step.ranks[rank].content(row)[:2]
            changed = changed or parts.setdefault(placement.pieces, value) != value
        rank, row = next(iter(kept.items()))
        key = step.ranks[rank].key(row)
        assert key.placement is not None
        shape = key.placement.logical_shape
        is_whole = sum(prod(piece.sizes) for part in parts for piece in part) == prod(shape)
        whole = (
            sum(h for h, _ in parts.values()) % FINGERPRINT_PRIME,
            sum(s for _, s in parts.values()) % (1 << 64),
            key.dtype,
        )
        wrong: Sides = {}
        for rank, row in uses.items():
            events = step.ranks[rank]
            used = events.key(row)
            is_shard = used.placement is not None and bool(used.placement.sharded)
            if (
                changed
                or is_shard
                or (used.dtype, used.shape) != (key.dtype, shape)
                or not is_whole
            ):
                self._skip(events, row, changed, is_whole, found)
            elif events.content(row) == whole:
                found.hold(events, row)
            else:
                wrong[rank] = row
        if wrong:
            sentence = (
                f"{what(key)} as it is used on {named_ranks(wrong)} is not what its shards make."
            )
            found.breaks(step, wrong, sentence)

    def _skip(
        self, events: RankEvents, row: int, changed: bool, is_whole: bool, found: Findings
    ) -> None:
        found.skip(events, row, _CHANGED if changed else _UNLIKE if is_whole else _LACKS_PARTS)


def _replaces(key: EventKey) -> bool:
    return key.phase == "optimizer" or is_loaded(key)
