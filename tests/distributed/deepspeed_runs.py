"""What recorded DeepSpeed runs hold: verdicts on them, and the merged parts of their tensors."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.trace.reader import open_trace


def verdict(baseline: Path, target: Path) -> Any:
    return compare_runs(open_trace(baseline), open_trace(target))


def broken(run: Path) -> list[str]:
    """What must hold inside one run and does not."""
    return [one.explanation for one in check_run(open_trace(run), Selection()).broken]


def last_events(run: Path, phase: str, role: str, slot: str) -> dict[str, dict[int, Any]]:
    """Of the last step: boundary -> (fingerprint, placement) of each rank that has it."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    trace = open_trace(run)
    for rank in trace.ranks:
        batch = trace.read(rank, trace.steps(rank)[-1].step)
        for row in range(len(batch)):
            key = batch.key_of(row)
            if (key.phase, key.role, key.slot) == (phase, role, slot):
                found[key.boundary][rank] = (batch.fingerprint(row), key.placement)
    return found


def merged(parts: dict[int, Any]) -> Any:
    """The fingerprint of the whole, from the parts of all ranks; replicas count once."""
    distinct = {placement.pieces: (print_, placement) for print_, placement in parts.values()}
    for print_, placement in parts.values():
        assert distinct[placement.pieces][0] == print_, "replicas differ"
    check_cover([placement for _, placement in distinct.values()])
    whole, *others = [print_ for print_, _ in distinct.values()]
    for other in others:
        whole += other
    return whole


def answer(found: Any) -> str:
    """Where a divergence is, in one line: step, micro-batch, phase, boundary, role, kind, ranks."""
    boundary = found.boundary.replace(found.boundary.partition("[")[2].partition("]")[0], "")
    boundary = boundary.replace("[]", "")
    microbatch = "-" if found.microbatch is None else found.microbatch
    parts = [found.step, microbatch, found.phase, boundary, found.role, found.kind, *found.ranks]
    return " ".join(map(str, parts))
