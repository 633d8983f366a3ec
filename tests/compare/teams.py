"""Teams for tests: threads that stand in for processes, and real commands under `mpiexec`."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.team import Part, joined
from upguard_plugin.errors import UpGuardError

MPIEXEC = Path(sys.executable).with_name("mpiexec")


class Meeting:
    """Where the threads of a test meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[bytes] = [b""] * size


class ThreadTeam:
    def __init__(self, index: int, meeting: Meeting) -> None:
        self.index, self.size, self._meeting = index, meeting.size, meeting

    def share(self, make):
        self._meeting.parts[self.index] = pickle.dumps(Part.of(make))
        self._meeting.barrier.wait()
        parts = [pickle.loads(part) for part in self._meeting.parts]
        self._meeting.barrier.wait()
        return joined(parts)

    def collect(self, make):
        found = self.share(make)
        return [] if self.index else found


def together(size: int, baseline, target, **options) -> list:
    """What each of `size` threads answers: the verdict, or the error."""
    meeting = Meeting(size)

    def member(index: int):
        try:
            return compare_runs(baseline, target, team=ThreadTeam(index, meeting), **options)
        except UpGuardError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def command(*words, processes: int | None = None) -> subprocess.CompletedProcess:
    """`upguard compare` as a process of its own, or several by mpiexec."""
    launcher = [] if processes is None else [str(MPIEXEC), "-n", str(processes)]
    line = [*launcher, sys.executable, "-m", "upguard_plugin.cli", "compare", *map(str, words)]
    environment = os.environ | {"LD_LIBRARY_PATH": str(library_folder())}
    return subprocess.run(
        line, capture_output=True, text=True, timeout=120, cwd="/", env=environment
    )


def library_folder() -> Path:
    """Where the MPI library lies that was installed with mpi4py, perhaps in another environment."""
    found = importlib.util.find_spec("mpi4py")
    return Path(sys.prefix) if found is None else Path(found.origin).parents[3]


def needs_mpi():
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if not MPIEXEC.exists():
        pytest.skip("there is no mpiexec beside this Python")
