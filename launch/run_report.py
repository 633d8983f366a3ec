"""What `upguard run` says at the end: where the trace lies, and the command that compares it.

In:  the run directories of the launches that were made, and how the last one ended.
Out: a few lines for stderr. A run in which nothing was recorded is said first and clearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from upguard_plugin.errors import UpGuardError
from upguard_plugin.trace.reader import open_trace

NOTHING = (
    "no training loop was seen: no torch optimizer stepped after a model's forward, or the ranks",
    "did not get UpGuard's variables (env -i, sudo, containers), or its package cannot be loaded",
)


def report_lines(runs: Sequence[Path], exit_code: int, num_planned: int) -> list[str]:
    """The lines for `runs`, of which only the last may have failed."""
    lines = [f"upguard: the command ended with exit code {exit_code}"] if exit_code else []
    recorded = [run for run in runs if _has_ranks(run)]
    for run in runs:
        lines += _run_lines(run) if run in recorded else [f"upguard: nothing was recorded in {run}"]
    if len(recorded) < len(runs):
        lines += [f"  {line}" for line in NOTHING]
    if len(runs) < num_planned:
        lines.append(f"upguard: {len(runs)} of {num_planned} runs were started")
    if recorded:
        baseline, target = (recorded * 2)[:2] if len(recorded) > 1 else (recorded[0], "OTHER_RUN")
        lines.append(f"  compare it  upguard compare {baseline} {target}")
    return lines


def _has_ranks(run: Path) -> bool:
    return any(run.glob("rank*/"))


def _run_lines(run: Path) -> list[str]:
    try:
        trace = open_trace(run)
        steps = {rank: len(trace.steps(rank)) for rank in trace.ranks}
        ends = {rank: trace.end(rank) for rank in trace.ranks}
    except UpGuardError as error:
        return [f"upguard: the trace in {run} cannot be read", f"  {error.sentence}"]
    fewest, most = min(steps.values()), max(steps.values())
    span = f"{most} steps" if fewest == most else f"{fewest} to {most} steps"
    ranks = f"{len(steps)} ranks" if len(steps) > 1 else f"rank {next(iter(steps))}"
    lines = [f"upguard: trace in {run}: {ranks}, {span}"]
    if trace.missing_ranks:
        lines.append(f"  missing     ranks {', '.join(map(str, trace.missing_ranks))}")
    lines += [
        f"  incomplete  rank {rank}: {end.reason}" for rank, end in ends.items() if not end.complete
    ]
    if trace.attempts:
        lines.append(f"  attempts    {len(trace.attempts) + 1}; the trace is that of the first")
    return lines
