"""Fingerprints of whole tensors, added up from what the ranks of a trace hold of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upguard_plugin.placement_cover import check_cover
from upguard_plugin.records import EventKey, Fingerprint, Placement
from upguard_plugin.trace.reader import open_trace


@dataclass(frozen=True)
class Seen:
    """One event of one rank."""

    rank: int
    step: int
    microbatch: int
    seq: int
    call: int
    key: EventKey
    h: int
    s: int


def events(run: Path) -> Iterator[Seen]:
    """All events of a run, rank by rank in program order."""
    trace = open_trace(run)
    for rank in trace.ranks:
        for entry in trace.steps(rank):
            batch = trace.read(rank, entry.step)
            for i in range(len(batch)):
                yield Seen(
                    rank, batch.step, int(batch.microbatch[i]), int(batch.seq[i]),
                    int(batch.call[i]), batch.key_of(i), int(batch.h[i]), int(batch.s[i]),
                )  # fmt: skip


def whole(parts: list[Seen]) -> Fingerprint:
    """The fingerprint of the logical tensor of which these events are parts or replicas.

    Raises PlacementError if they do not make it up, ValueError if replicas differ.
    """
    by_place: dict[tuple, Seen] = {}
    for part in parts:
        placement = part.key.placement
        assert placement is not None, f"{part.key.boundary} {part.key.slot}: placement unknown"
        assert not placement.partial, f"{part.key.boundary}: a partial sum over {placement.partial}"
        other = by_place.setdefault(placement.pieces, part)
        if (other.h, other.s) != (part.h, part.s):
            raise ValueError(f"replicas of {part.key.boundary} differ")
    first = parts[0].key
    check_cover([_placement(part) for part in by_place.values()], first.boundary)
    total, *rest = [
        Fingerprint(p.h, p.s, p.key.dtype, _placement(p).logical_shape) for p in by_place.values()
    ]
    for part in rest:
        total = total + part
    return total


def _placement(part: Seen) -> Placement:
    assert part.key.placement is not None
    return part.key.placement


def states(run: Path, step: int, phase: str = "optimizer") -> dict[tuple[str, str], list[Seen]]:
    """(kind, name) -> the events of all ranks that hold parts of it, as the step leaves them."""
    found = defaultdict(list)
    for event in events(run):
        key = event.key
        if event.step != step:
            continue
        if key.role == "main_grad" and key.phase == "grad_sync":
            found["main_grad", key.boundary].append(event)
        elif key.phase == phase and key.role in ("param", "master"):
            found[key.role, key.boundary].append(event)
        elif key.phase == phase and key.role == "optimizer_state" and key.slot != "step":
            found[key.slot, key.boundary].append(event)
    return found


ACTIVATIONS = ("input", "output", "grad_input", "grad_output")


def activations(run: Path) -> dict[tuple, list[Seen]]:
    """The tensors of modules and their gradients, by place: what all ranks hold of each."""
    found = defaultdict(list)
    for event in events(run):
        key = event.key
        is_operator = (key.operator or "").startswith("aten.")
        if key.role in ACTIVATIONS and key.group is None and not is_operator:
            place = (event.step, event.microbatch, event.call, key.boundary, key.phase)
            found[(*place, key.role, key.slot)].append(event)
    return found


def adds_up(parts: list[Seen]) -> Fingerprint | None:
    """The whole of parts and replicas; None where they are partial sums, or not placed.

    Raises PlacementError if they do not make it up, ValueError if replicas differ.
    """
    placements = [part.key.placement for part in parts]
    if any(placement is None or placement.partial for placement in placements):
        return None
    return whole(parts)


def first_outputs(run: Path) -> dict[str, list]:
    """Module -> [h, s, dtype, shape] of the whole that it gave first in step 1."""
    found: dict[str, list] = {}
    for place, parts in activations(run).items():
        step, microbatch, _, boundary, phase, role, slot = place
        merged = adds_up(parts)
        is_output = (step, microbatch, phase, role) == (1, 0, "forward", "output")
        if is_output and slot in ("0", "out.0") and merged is not None:
            facts = [merged.h, merged.s, merged.dtype, list(merged.shape)]
            found.setdefault(boundary, facts)
    return found
