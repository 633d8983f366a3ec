"""Start the demo's two ranks, wait for them, and collect what they say.

In:  jobs, and a folder for the ranks to meet in. Out: their outcomes.
The processes share no port, only a file; when one fails the other is ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from upguard_plugin.errors import UpGuardError
from upguard_plugin.launch.demo.jobs import NUM_RANKS, Job, Outcome, read_outcomes, write_jobs

_POLL_S = 0.1
_TIMEOUT_S = 600.0  # twenty times what it takes on two busy cores


def train(jobs: Sequence[Job], folder: Path) -> list[tuple[Outcome, ...]]:
    """Run the jobs one after the other on two processes.

    folder: an empty directory; the ranks leave their logs there. Returns for each job one outcome
    per rank. Raises UpGuardError if a rank fails or takes more than ten minutes.
    """
    write_jobs(folder / "jobs.json", jobs)
    ranks = [_start(rank, folder) for rank in range(NUM_RANKS)]
    try:
        _wait(ranks, folder)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    outcomes = [read_outcomes(folder / f"outcomes-{rank}.json") for rank in range(NUM_RANKS)]
    return list(zip(*outcomes, strict=True))


def _start(rank: int, folder: Path) -> subprocess.Popen[bytes]:
    # The caller's own settings for UpGuard are for another training.
    inherited = {k: v for k, v in os.environ.items() if "UPGUARD" not in k}
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "upguard_plugin.launch.demo.worker", str(rank), str(folder)],
            cwd=folder,  # `-m` puts it on the search path: a checkout there would hide the package
            env=inherited | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed or time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    codes = {rank: process.poll() for rank, process in enumerate(ranks)}
    unfinished = [rank for rank, code in codes.items() if code != 0]
    if unfinished:
        # The one with an exit code failed; the other may only have waited for it.
        rank = next((rank for rank in unfinished if codes[rank] is not None), unfinished[0])
        log = folder / f"rank-{rank}.log"
        code = codes[rank]
        raise UpGuardError(
            f"the demo's training failed on rank {rank}",
            evidence={
                "exit": f"none after {_TIMEOUT_S:.0f} s" if code is None else code,
                "said": _last_line(log),
                "log": log,
            },
        )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
